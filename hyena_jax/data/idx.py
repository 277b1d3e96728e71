"""The IDX files of MNIST: a magic number, the sizes (both big endian), then the elements, row by row."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from hyena_jax.config import UserError, require

GZIP = b"\x1f\x8b"
# The third byte says uint8, the fourth how many dimensions.
MAGIC = {"images": bytes.fromhex("00000803"), "labels": bytes.fromhex("00000801")}


def read_pair(argument: str, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, H, W] and labels uint8 [n] of the one pair of IDX files in a folder.

    Files are told apart by their magic numbers, not by their names, and may be compressed by gzip; other
    files in the folder do no harm, unless they begin as gzip does and are not.

    Raises:
      UserError: if there is no such folder, pair or file, a file is not whole, or the two do not belong
        together. It names `argument`, the file, what was found and what is allowed.
    """
    require(Path(path).is_dir(), argument, path, "an existing folder with a pair of IDX files")
    files = _find_pair(argument, path)
    images, labels = (_read(argument, files[kind], n_dims) for kind, n_dims in (("images", 3), ("labels", 1)))
    require(images.size > 0, f"{argument}: images in {str(files['images'])!r}", images.shape, "not empty")
    if len(images) != len(labels):
        raise UserError(
            f"{argument} must hold a label for each image, got {len(images)} images in"
            f" {str(files['images'])!r} and {len(labels)} labels in {str(files['labels'])!r}"
        )
    return images, labels


def _find_pair(argument: str, path: str) -> dict[str, Path]:
    files = sorted(file for file in Path(path).iterdir() if file.is_file() and not file.name.startswith("."))
    magic = {file: _contents(argument, file, size=4) for file in files}
    found = {kind: [file for file in files if magic[file] == number] for kind, number in MAGIC.items()}
    if any(len(candidates) != 1 for candidates in found.values()):
        seen = ", ".join(f"{file.name} (0x{number.hex()})" for file, number in magic.items())
        raise UserError(
            f"{argument} must be a folder with one IDX file of images (uint8 in 3 dimensions: magic number"
            f" 0x{MAGIC['images'].hex()}) and one of labels (uint8 in 1: 0x{MAGIC['labels'].hex()}),"
            f" got {path!r} with {seen or 'no files'}"
        )
    return {kind: candidates[0] for kind, candidates in found.items()}


def _read(argument: str, file: Path, n_dims: int) -> np.ndarray:
    data = _contents(argument, file)
    n_header = 4 + 4 * n_dims
    if len(data) < n_header:
        raise UserError(f"{argument}: {str(file)!r} must have a header of {n_header} bytes, got {len(data)}")
    shape = [int(size) for size in np.frombuffer(data, ">u4", n_dims, offset=4)]
    n_elements = len(data) - n_header
    if n_elements != math.prod(shape):
        sizes = " x ".join(map(str, shape))
        raise UserError(
            f"{argument}: {str(file)!r} must hold {sizes} bytes after its header, which says so,"
            f" got {n_elements}"
        )
    return np.frombuffer(data, np.uint8, offset=n_header).reshape(shape)


def _contents(argument: str, file: Path, size: int = -1) -> bytes:
    """The first `size` bytes of a file, or all; of what was compressed, where it is."""
    try:
        with file.open("rb") as raw:
            is_compressed = raw.read(2) == GZIP
        with gzip.open(file) if is_compressed else file.open("rb") as opened:
            return opened.read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{argument}: {str(file)!r} must be a whole gzip file: {error}") from error
    except OSError as error:
        raise UserError(f"{argument}: {str(file)!r} cannot be read: {error}") from error
