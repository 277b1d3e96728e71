"""Opening and preparing a data set of TensorFlow Datasets, quietly, with errors that say what to do."""

import contextlib
import difflib
import io
import logging
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from hyena_jax.data.tokenizers import silent_stderr
from hyena_jax.system.errors import UserError, require

if TYPE_CHECKING:
    import tensorflow_datasets as tfds


def open_builder(name: str, tfds_dir: str | None, bundled: str) -> "tfds.core.DatasetBuilder":
    """The data set `name`, prepared or not, as ArrayRecord files in `tfds_dir`.

    `bundled` is the name that needs no download, for the error of an unknown name. A folder may be a
    stranger's: of the classes that its features.json names, only those of TensorFlow Datasets are imported.
    """
    import tensorflow_datasets as tfds

    class_of = tfds.features.FeatureConnector.cls_from_name

    def known(class_name: str) -> type:
        must = "a class of tensorflow_datasets, since no other code is imported for a data set"
        at = f"a pythonClassName in the features.json of {name!r}"
        require(class_name.startswith("tensorflow_datasets."), at, class_name, must)
        return class_of(class_name)

    try:
        with mock.patch.object(tfds.features.FeatureConnector, "cls_from_name", known):
            return tfds.builder(name, data_dir=tfds_dir, file_format="array_record")
    except UserError:
        raise
    except Exception as error:  # TFDS raises many kinds: name, version, file format, other hubs out of reach
        # Without community data sets, whose list is read from the network.
        names = set(tfds.list_builders(with_community_datasets=False))
        if name in names:
            reason = str(error).rpartition('": ')[2]
            raise UserError(
                f"name {name!r} cannot be opened in tfds_dir {tfds_dir!r} ({reason});"
                " give another folder with --data.tfds-dir"
            ) from error
        near = difflib.get_close_matches(name, names, n=3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise UserError(
            f"must be {bundled} or a data set of TensorFlow Datasets, got {name!r}{hint}", "name"
        ) from error


def ensure_prepared(builder: "tfds.core.DatasetBuilder", manual_dir: str | None, instead: str) -> None:
    """Writes ArrayRecord files, unless that was done, of source files in `manual_dir` or downloaded ones.

    `instead` says what a user without network can give instead, in the error if that fails.
    """
    import tensorflow_datasets as tfds

    if builder.is_prepared():
        return
    if manual_dir is not None:
        require(Path(manual_dir).is_dir(), "manual_dir", manual_dir, "an existing folder")
    try:
        download_config = tfds.download.DownloadConfig(manual_dir=manual_dir)
        with silent_stderr():
            builder.download_and_prepare(download_config=download_config)
    except ImportError as error:
        raise UserError(
            f"{builder.name!r} must be prepared first, which needs the package {error.name}:"
            " pip install 'hyena_jax[tfds]'",
            "name",
        ) from error
    except Exception as error:  # anything that the data set's code, the network or the disk raises
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        files = [f"{url} as {info.filename}" for url, info in builder.url_infos.items() if info.filename]
        how = f"give {instead}"
        if 1 <= len(files) <= 4:  # MNIST has four; nobody saves more by hand
            how = f"save {' and '.join(files)} in a folder and give --data.manual-dir FOLDER, or {how}"
        raise UserError(f"name {builder.name!r} cannot be prepared ({reason}); {how}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the progress bars, prints, Python logs and warnings of TensorFlow Datasets."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download import downloader

    tfds.disable_progress_bar()
    # Its ten retries with doubling delays would take minutes on a machine without network.
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
