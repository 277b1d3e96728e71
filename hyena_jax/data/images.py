"""Labelled images: scikit-learn's digits, pairs of IDX files (as of MNIST), or TensorFlow Datasets.

Shapes: B batch, H height, W width, C colours, n images.
"""

import gzip
import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from hyena_jax.config import ImagesConfig
from hyena_jax.data.dataset import Batch, Dataset, Normalization
from hyena_jax.data.tfds import ensure_prepared, open_builder, quiet
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import memory_size, open_input

GZIP = b"\x1f\x8b"
MAX_GZIP_RATIO = 1032
"""Most bytes that a byte of deflate can expand to (zlib.net/zlib_tech.html)."""
# The third byte means uint8, the fourth is the number of dimensions.
MAGIC = {"images": bytes.fromhex("00000803"), "labels": bytes.fromhex("00000801")}


class Labelled(NamedTuple):
    """Images uint8 [n, H, W, C] and labels uint8 [n]."""

    images: np.ndarray
    labels: np.ndarray


def fit_normalization(images: np.ndarray) -> Normalization:
    """The normalisation of images uint8 [n, H, W, C] to mean 0, std 1. UserError if all pixels are equal."""
    # Counting pixel values image by image is exact and needs no copy of the images in another dtype.
    counts = sum(np.bincount(image.ravel(), minlength=256) for image in images)
    values, weights = np.arange(256) / 255, counts / counts.sum()
    mean = weights @ values
    std = np.sqrt(weights @ (values - mean) ** 2)
    require(np.count_nonzero(counts) > 1, "training images", int(counts.argmax()), "of more than one value")
    return Normalization(float(mean), float(std))


@dataclass(frozen=True, eq=False)
class ImageSet(Dataset):
    """Images to train on and to evaluate on, with their origin."""

    train: Labelled
    held_out: Labelled
    normalization: Normalization
    fingerprint: str
    """SHA-256 of the normalisation and all images and labels."""
    source: str

    inputs, kind, unit = "images", "images", "image"

    @property
    def n_train_rows(self) -> int:
        return len(self.train.images)

    @property
    def n_held_out_rows(self) -> int:
        return len(self.held_out.images)

    def train_rows(self, indices: np.ndarray) -> Batch:
        """`inputs` float32 [B, H, W, C] and `targets` int32 [B]."""
        return self._rows(self.train, indices)

    def held_out_rows(self, indices: np.ndarray) -> Batch:
        return self._rows(self.held_out, indices)

    def _rows(self, part: Labelled, indices: np.ndarray) -> Batch:
        images, labels = part.images[indices], part.labels[indices]
        return {"inputs": self.normalization(images), "targets": labels.astype(np.int32)}

    @property
    def sizes(self) -> dict[str, Any]:
        """The size and colours of an image, and the number of classes: the largest label plus one."""
        *size, channels = self.train.images.shape[1:]
        n_classes = 1 + int(max(self.train.labels.max(), self.held_out.labels.max()))
        return {"image_size": tuple(size), "channels": channels, "n_classes": n_classes}

    @property
    def curves(self) -> dict[str, str]:
        return {**super().curves, "accuracy": "accuracy"}

    def to_json(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint, "normalization": self.normalization.to_json()}


def load_image_set(config: ImagesConfig, normalization: Normalization | None = None) -> ImageSet:
    """The images of `config`; normalization None fits one to the training part."""
    if config.path is not None:
        train, held_out, source = _from_path(config)
    elif config.name == "digits":
        train, held_out, source = _from_scikit_learn()
    else:
        train, held_out, source = _from_tfds(config)
    shapes = train.images.shape[1:], held_out.images.shape[1:]
    if shapes[0] != shapes[1]:
        raise UserError(f"held-out images must have the training images' shape {shapes[0]}, got {shapes[1]}")
    return image_set(train, held_out, source, normalization)


def image_set(
    train: Labelled, held_out: Labelled, source: str, normalization: Normalization | None = None
) -> ImageSet:
    """The two parts as a data set; normalization None fits one to the training part."""
    if normalization is None:
        normalization = fit_normalization(train.images)
    # The shapes put the border between the two parts into the digest.
    header = [normalization.to_json(), train.images.shape, held_out.images.shape]
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for array in (*train, *held_out):
        digest.update(np.ascontiguousarray(array))
    return ImageSet(train, held_out, normalization, digest.hexdigest(), source)


def _from_path(config: ImagesConfig) -> tuple[Labelled, Labelled, str]:
    every = read_pair("path", config.path)
    if config.validation_path is not None:
        held_out = read_pair("validation_path", config.validation_path)
        return every, held_out, f"{config.path}, held out: {config.validation_path}"
    cut = len(every.images) * 9 // 10
    if cut == 0:
        raise UserError(f"must hold at least 2 images, to hold one out, got {config.path!r} with 1", "path")
    train, held_out = (Labelled(*(part[rows] for part in every)) for rows in (slice(cut), slice(cut, None)))
    return train, held_out, f"{config.path}, held out: its last 10%"


def _from_scikit_learn() -> tuple[Labelled, Labelled, str]:
    """1,797 images of 8 x 8 with values 0 to 16; a fixed random fifth is held out, whatever the seed."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = digits.images[..., None].astype(np.uint8), digits.target.astype(np.uint8)
    # RandomState, not default_rng: NumPy promises that its stream never changes.
    order = np.random.RandomState(0).permutation(len(images))
    cut = len(images) * 4 // 5
    train, held_out = (Labelled(images[rows], labels[rows]) for rows in (order[:cut], order[cut:]))
    return train, held_out, "digits of scikit-learn, held out: a fixed random fifth"


def _from_tfds(config: ImagesConfig) -> tuple[Labelled, Labelled, str]:
    """The data set's own train and test splits."""
    with quiet():
        builder = open_builder(config.name, config.tfds_dir, bundled="digits")
        ensure_prepared(builder, config.manual_dir, instead="a folder of IDX files with --data.path FOLDER")
        parts = []
        for split in ("train", "test"):
            examples, shape = builder.as_data_source(split=split), builder.info.features["image"].shape
            images, labels = np.empty((len(examples), *shape), np.uint8), np.empty(len(examples), np.uint8)
            for i, example in enumerate(examples):
                images[i], labels[i] = example["image"], example["label"]
            parts.append(Labelled(images, labels))
    return *parts, f"{builder.info.full_name} of TensorFlow Datasets"


def read_pair(argument: str, path: str) -> Labelled:
    """Images uint8 [n, H, W, 1] and labels uint8 [n] of the only pair of IDX files in a folder.

    Files are recognised by their magic numbers, not by their names, and may be compressed with gzip; other
    files do no harm, unless they begin with gzip's magic number and are not gzip files.
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
    return Labelled(images[..., None], labels)


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
