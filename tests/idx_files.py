"""Small IDX files."""

import gzip
from pathlib import Path

import numpy as np


def idx_bytes(array: np.ndarray) -> bytes:
    """A uint8 array as an IDX file."""
    sizes = np.array(array.shape, ">u4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def random_images(n: int, height: int = 6, width: int = 5, n_classes: int = 3, seed: int = 0):
    """Images whose brightest row is the class, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % n_classes
    images = rng.integers(0, 60, (n, height, width))
    images[np.arange(n), labels] += 150
    return images.astype(np.uint8), labels.astype(np.uint8)


def write_pair(folder: Path, n: int = 20, compressed: bool = False, **options) -> Path:
    """A folder with a pair of files of `random_images`."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix, pack = (".gz", gzip.compress) if compressed else ("", bytes)
    for name, array in zip(("images", "labels"), random_images(n, **options), strict=True):
        (folder / f"{name}-ubyte{suffix}").write_bytes(pack(idx_bytes(array)))
    return folder
