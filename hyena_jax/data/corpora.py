"""Sources of text: a file or folder, Python's own source code, or TensorFlow Datasets."""

import os
import platform
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hyena_jax.config import TextConfig, UserError, memory_size, read_bytes, require
from hyena_jax.data.tfds_builder import open_builder, prepare, quiet

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

STDLIB_BYTES = 8_000_000
"""Size of `python_stdlib`; the whole library is some 12 MB."""
MEMORY_PER_BYTE = 6
"""Least bytes of memory per byte of text: the text, its two parts, and its symbols as int32."""
STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders that are not the standard library, or hold its tests."""


class Text(NamedTuple):
    """A text to train on and a text to evaluate on."""

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
    """The text of a file, or the concatenated text of all files below a folder."""
    root = Path(path)
    if root.suffix in (".npy", ".bin"):
        raise UserError(f"{argument} {path!r} is a file of tokens, not of text; add --data tokens")
    try:
        if not root.is_file() and not root.is_dir():
            raise UserError(f"must be an existing text file or folder, got {path!r}", argument)
        files = _files_below(root) if root.is_dir() else [root]
        size = sum(file.stat().st_size for file in files)
        most = memory_size() // MEMORY_PER_BYTE
        require(size <= most, argument, path, f"at most {most} bytes, to fit this machine's memory")
        text = "".join(_decode(argument, file, read_bytes(argument, file, most)) for file in files)
    except OSError as error:
        raise UserError(f"{path!r} cannot be read: {error}", argument) from error
    require(text != "", argument, path, "a file or folder with some text")
    return text


def _files_below(folder: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Regular files below `folder`, by relative path; none hidden, none in linked or `skipped` folders."""

    def refuse(error: OSError) -> None:
        raise error  # os.walk would skip a folder that it may not enter

    found = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(filter(Path.is_file, found), key=lambda path: path.relative_to(folder).as_posix())


def _decode(argument: str, file: Path, data: bytes) -> str:
    """The UTF-8 text, newlines unchanged, without a byte order mark at the start."""
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(
            f"must hold UTF-8 text, but {str(file)!r} has byte {data[error.start]:#04x}"
            f" at offset {error.start}",
            argument,
        ) from error


def _from_python_stdlib() -> Text:
    """The standard library, every tenth file held out so that both parts are alike; no separators."""
    files = _stdlib_files(Path(sysconfig.get_path("stdlib")))
    train = "".join(text for index, text in enumerate(files) if index % 10 != 9)
    held_out = "".join(files[9::10])
    source = f"standard library of Python {platform.python_version()}, held out: every tenth file"
    return Text(train, held_out, source)


def _stdlib_files(root: Path) -> list[str]:
    """The library's files in the order of their paths, up to `STDLIB_BYTES` in all."""
    texts, size = [], 0
    for file in _files_below(root, STDLIB_SKIPPED):
        # The build writes _sysconfigdata: paths and flags of one machine.
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
    """The train split; the validation and test splits, in that order, are held out."""
    with quiet():
        builder = open_builder(config.name, config.tfds_dir, bundled="python_stdlib")
        _require_text(config.name, builder)
        if not builder.is_prepared():
            prepare(builder, config.manual_dir, instead="any text with --data.path FILE")
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


def _require_text(name: str, builder: "tfds.core.DatasetBuilder") -> None:
    import tensorflow_datasets as tfds

    features = dict(builder.info.features)
    if len(features) != 1 or not all(isinstance(value, tfds.features.Text) for value in features.values()):
        found = ", ".join(f"{key} ({type(value).__name__})" for key, value in features.items())
        raise UserError(f"must be a data set with one feature, a Text, got {name!r} with: {found}", "name")
