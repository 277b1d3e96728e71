"""Where text comes from: a file or folder, Python's own source code, or TensorFlow Datasets."""

import contextlib
import difflib
import io
import logging
import os
import platform
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hyena_jax.config import TextConfig, UserError, require

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

STDLIB_BYTES = 8_000_000
"""Size of `python_stdlib`; the whole library is some 12 MB."""
STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders that are not the standard library, or hold its tests."""


class Text(NamedTuple):
    """A text to learn and a text to judge by."""

    train: str
    held_out: str
    source: str
    """Where it came from, for people."""


def load_text(config: TextConfig) -> Text:
    """Reads the text that `config` names. Raises UserError if it is missing, empty or unreadable."""
    if config.path is not None:
        return _from_path(config)
    if config.name == "python_stdlib":
        return _from_python_stdlib()
    return _from_tfds(config)


def _from_path(config: TextConfig) -> Text:
    text = _read("path", config.path)
    if config.validation_path is not None:
        held_out = _read("validation_path", config.validation_path)
        return Text(text, held_out, f"{config.path}, held out: {config.validation_path}")
    # The cut that TensorFlow Datasets makes in tiny_shakespeare, so that both ways to it agree.
    cut = int(len(text) * 0.9)
    return Text(text[:cut], text[cut:], f"{config.path}, held out: its last 10%")


def _read(argument: str, path: str) -> str:
    """The text of a file, or of all files below a folder, one behind the other."""
    root = Path(path)
    try:
        if not root.is_file() and not root.is_dir():
            raise UserError(f"{argument} must be an existing text file or folder, got {path!r}")
        files = _files_below(root) if root.is_dir() else [root]
        text = "".join(_decode(argument, file, file.read_bytes()) for file in files)
    except OSError as error:
        raise UserError(f"{argument} {path!r} cannot be read: {error}") from error
    require(text != "", argument, path, "a file or folder with some text")
    return text


def _files_below(folder: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Regular files below `folder` by relative path; nothing hidden, no linked and no `skipped` folders."""

    def refuse(error: OSError) -> None:
        raise error  # os.walk would pass over a folder that it may not enter

    found = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(filter(Path.is_file, found), key=lambda path: path.relative_to(folder).as_posix())


def _decode(argument: str, file: Path, data: bytes) -> str:
    """UTF-8 with newlines as they are; a byte order mark at the start is not text."""
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{argument} must hold UTF-8 text, but {str(file)!r} has byte {data[error.start]:#04x}"
            f" at offset {error.start}"
        ) from error


def _from_python_stdlib() -> Text:
    """Every tenth file is held out, so that both parts are of one kind. No separator between files."""
    files = _stdlib_files(Path(sysconfig.get_path("stdlib")))
    train = "".join(text for index, text in enumerate(files) if index % 10 != 9)
    held_out = "".join(files[9::10])
    source = f"standard library of Python {platform.python_version()}, held out: every tenth file"
    return Text(train, held_out, source)


def _stdlib_files(root: Path) -> list[str]:
    """The texts of the library's first `STDLIB_BYTES`, by relative path."""
    texts, size = [], 0
    for file in _files_below(root, STDLIB_SKIPPED):
        # _sysconfigdata is written by the build: paths and flags of one machine.
        if file.suffix != ".py" or file.name.startswith("_sysconfigdata"):
            continue
        try:
            data = file.read_bytes()
            text = data.decode().removeprefix("\ufeff")
        except UnicodeDecodeError:
            continue
        size += len(data)
        if size > STDLIB_BYTES:
            break
        texts.append(text)
    if len(texts) < 10:
        raise UserError(
            f"name 'python_stdlib' needs Python's own source files, but {str(root)!r} has only {len(texts)}"
        )
    return texts


def _from_tfds(config: TextConfig) -> Text:
    """The train split; held out are the validation and test splits, in that order."""
    with _quiet():
        builder = _tfds_builder(config)
        _require_text(config.name, builder)
        if not builder.is_prepared():
            _prepare(config, builder)
        (feature,) = builder.info.features
        splits = {
            split: "\n".join(example[feature].decode() for example in builder.as_data_source(split=split))
            for split in ("train", "validation", "test")
            if split in builder.info.splits
        }
    held_out = splits.get("validation", "") + splits.get("test", "")
    if not splits.get("train") or not held_out:
        found = ", ".join(builder.info.splits)
        raise UserError(f"name {config.name!r} must have train and validation or test splits, got {found}")
    return Text(splits["train"], held_out, f"{builder.info.full_name} of TensorFlow Datasets")


def _tfds_builder(config: TextConfig) -> "tfds.core.DatasetBuilder":
    import tensorflow_datasets as tfds

    try:
        return tfds.builder(config.name, data_dir=config.tfds_dir, file_format="array_record")
    except Exception as error:  # TFDS raises many kinds: name, version, file format, other hubs out of reach
        # Without the community's, whose list is read from the network.
        names = set(tfds.list_builders(with_community_datasets=False))
        if config.name in names:
            reason = str(error).rpartition('": ')[2]
            raise UserError(
                f"name {config.name!r} cannot be opened in tfds_dir {config.tfds_dir!r} ({reason});"
                " give another folder by --data.tfds-dir"
            ) from error
        near = difflib.get_close_matches(config.name, names, n=3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise UserError(
            f"name must be python_stdlib or a data set of TensorFlow Datasets, got {config.name!r}{hint}"
        ) from error


def _require_text(name: str, builder: "tfds.core.DatasetBuilder") -> None:
    import tensorflow_datasets as tfds

    features = dict(builder.info.features)
    if len(features) != 1 or not all(isinstance(value, tfds.features.Text) for value in features.values()):
        found = ", ".join(f"{key} ({type(value).__name__})" for key, value in features.items())
        raise UserError(f"name must be a data set with one feature, a Text, got {name!r} with: {found}")


def _prepare(config: TextConfig, builder: "tfds.core.DatasetBuilder") -> None:
    """Downloads the source files, or takes them from `config.manual_dir`, and writes ArrayRecord files."""
    import tensorflow_datasets as tfds

    if config.manual_dir is not None:
        require(Path(config.manual_dir).is_dir(), "manual_dir", config.manual_dir, "an existing folder")
    try:
        download_config = tfds.download.DownloadConfig(manual_dir=config.manual_dir)
        with _silent_stderr():
            builder.download_and_prepare(download_config=download_config)
    except ImportError as error:
        raise UserError(
            f"name {config.name!r} must be prepared first, which needs the package {error.name}:"
            " pip install 'hyena_jax[tfds]'"
        ) from error
    except Exception as error:  # whatever the data set's own code, the network or the disk raises
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        raise UserError(
            f"name {config.name!r} cannot be prepared ({reason}); {_how_to_supply(builder)}"
        ) from error


def _how_to_supply(builder: "tfds.core.DatasetBuilder") -> str:
    files = [f"{url} as {info.filename}" for url, info in builder.url_infos.items() if info.filename]
    if not files:
        return "give any text by --data.path FILE"
    wanted = " and ".join(files[:3])
    return (
        f"save {wanted} in a folder and give --data.manual-dir FOLDER, or give any text by --data.path FILE"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the progress bars, prints, Python logs and warnings of TensorFlow Datasets from the user."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download import downloader

    tfds.disable_progress_bar()
    # Its ten retries with doubling waits would let a machine without network wait for minutes.
    downloader.MAX_RETRIES = 2
    loggers = [logging.getLogger(name) for name in ("absl", "urllib3")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discards what is written to file descriptor 2: TensorFlow's C++ logs pass by `sys.stderr`."""
    stderr = os.dup(2)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
