"""The IDX files of MNIST: a magic number, the sizes (both big endian), then the elements, row by row."""

import gzip
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hyena_jax.config import UserError, memory_size, open_input, require

GZIP = b"\x1f\x8b"
MAX_GZIP_RATIO = 1032
"""Most bytes that a byte of deflate can expand to (zlib.net/zlib_tech.html)."""
# The third byte means uint8, the fourth is the number of dimensions.
MAGIC = {"images": bytes.fromhex("00000803"), "labels": bytes.fromhex("00000801")}


def read_pair(argument: str, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, H, W] and labels uint8 [n] of the only pair of IDX files in a folder.

    Files are recognised by their magic numbers, not by their names, and may be compressed with gzip; other
    files in the folder do no harm, unless they begin with gzip's magic number and are not gzip files.

    Raises:
      UserError: if there is no such folder or pair, a file is incomplete, or the two differ in number. It
        names `argument`, the file, what was found and what is allowed.
    """
    require(Path(path).is_dir(), argument, path, "an existing folder with a pair of IDX files")
    files = _find_pair(argument, path)
    images, labels = (_read(argument, files[kind], n_dims) for kind, n_dims in (("images", 3), ("labels", 1)))
    require(images.size > 0, f"{argument}: images in {str(files['images'])!r}", images.shape, "not empty")
    if len(images) != len(labels):
        raise UserError(
            f"must hold a label for each image, got {len(images)} images in"
            f" {str(files['images'])!r} and {len(labels)} labels in {str(files['labels'])!r}",
            argument,
        )
    return images, labels


def _find_pair(argument: str, path: str) -> dict[str, Path]:
    files = sorted(file for file in Path(path).iterdir() if file.is_file() and not file.name.startswith("."))
    magic = {}
    for file in files:
        with _opened(argument, file) as (content, _):
            magic[file] = content.read(4)
    found = {kind: [file for file in files if magic[file] == number] for kind, number in MAGIC.items()}
    if any(len(candidates) != 1 for candidates in found.values()):
        seen = ", ".join(f"{file.name} (0x{number.hex()})" for file, number in magic.items())
        raise UserError(
            f"must be a folder with one IDX file of images (uint8 in 3 dimensions: magic number"
            f" 0x{MAGIC['images'].hex()}) and one of labels (uint8 in 1: 0x{MAGIC['labels'].hex()}),"
            f" got {path!r} with {seen or 'no files'}",
            argument,
        )
    return {kind: candidates[0] for kind, candidates in found.items()}


def _read(argument: str, file: Path, n_dims: int) -> np.ndarray:
    n_header = 4 + 4 * n_dims
    with _opened(argument, file) as (content, most):
        header = content.read(n_header)
        if len(header) < n_header:
            raise UserError(
                f"{argument}: {str(file)!r} must have a header of {n_header} bytes, got {len(header)}"
            )
        shape = [int(size) for size in np.frombuffer(header, ">u4", n_dims, offset=4)]
        declared = math.prod(shape)
        if declared <= min(most - n_header, memory_size()):
            data = content.read(declared)
            found = len(data) if content.read(1) == b"" else "more"
        else:
            found = "a file or a memory that is too small for them"
    if found != declared:
        sizes = " x ".join(map(str, shape))
        raise UserError(
            f"{argument}: {str(file)!r} must hold {sizes} bytes after its header, as that says, got {found}"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


@contextmanager
def _opened(argument: str, file: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A file open for reading, decompressed if need be, and the most bytes that it can hold."""
    try:
        with open_input(argument, file) as raw:
            is_compressed = raw.read(2) == GZIP
            size = raw.seek(0, os.SEEK_END)
            raw.seek(0)
            with gzip.open(raw) if is_compressed else raw as content:
                yield content, size * MAX_GZIP_RATIO if is_compressed else size
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{argument}: {str(file)!r} must be a whole gzip file: {error}") from error
    except OSError as error:
        raise UserError(f"{argument}: {str(file)!r} cannot be read: {error}") from error
