"""Sources of labelled images: scikit-learn's digits, IDX files, or TensorFlow Datasets."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hyena_jax.config import ImagesConfig, UserError
from hyena_jax.data import idx
from hyena_jax.data.tfds_builder import open_builder, prepare, quiet


class Labelled(NamedTuple):
    """Images uint8 [n, H, W, C] and labels uint8 [n]."""

    images: np.ndarray
    labels: np.ndarray


class Images(NamedTuple):
    """Images to train on and images to evaluate on."""

    train: Labelled
    held_out: Labelled
    source: str
    """Where they came from, for people."""


def load_images(config: ImagesConfig) -> Images:
    """Reads the images that `config` names. Raises UserError if they are missing or unusable."""
    images = _read(config)
    shapes = images.train.images.shape[1:], images.held_out.images.shape[1:]
    if shapes[0] != shapes[1]:
        raise UserError(f"held-out images must have the training images' shape {shapes[0]}, got {shapes[1]}")
    return images


def _read(config: ImagesConfig) -> Images:
    if config.path is not None:
        return _from_path(config)
    if config.name == "digits":
        return _from_scikit_learn()
    return _from_tfds(config)


def _from_path(config: ImagesConfig) -> Images:
    every = _read_folder("path", config.path)
    if config.validation_path is not None:
        held_out = _read_folder("validation_path", config.validation_path)
        return Images(every, held_out, f"{config.path}, held out: {config.validation_path}")
    cut = len(every.images) * 9 // 10
    if cut == 0:
        raise UserError(f"must hold at least 2 images, to hold one out, got {config.path!r} with 1", "path")
    train, held_out = (Labelled(*(part[rows] for part in every)) for rows in (slice(cut), slice(cut, None)))
    return Images(train, held_out, f"{config.path}, held out: its last 10%")


def _read_folder(argument: str, path: str) -> Labelled:
    images, labels = idx.read_pair(argument, path)
    return Labelled(images[..., None], labels)


def _from_scikit_learn() -> Images:
    """1,797 images of 8 x 8 with values 0 to 16; a fixed random fifth is held out, whatever the seed."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = digits.images[..., None].astype(np.uint8), digits.target.astype(np.uint8)
    # RandomState, not default_rng: NumPy promises that its stream never changes.
    order = np.random.RandomState(0).permutation(len(images))
    cut = len(images) * 4 // 5
    train, held_out = (Labelled(images[rows], labels[rows]) for rows in (order[:cut], order[cut:]))
    return Images(train, held_out, "digits of scikit-learn, held out: a fixed random fifth")


def _from_tfds(config: ImagesConfig) -> Images:
    """The data set's own train and test splits."""
    with quiet():
        builder = open_builder(config.name, config.tfds_dir, bundled="digits")
        if not builder.is_prepared():
            prepare(builder, config.manual_dir, instead="a folder of IDX files with --data.path FOLDER")
        shape = builder.info.features["image"].shape
        train, held_out = (
            _read_examples(builder.as_data_source(split=split), shape) for split in ("train", "test")
        )
    return Images(train, held_out, f"{builder.info.full_name} of TensorFlow Datasets")


def _read_examples(examples: Sequence[Mapping[str, Any]], shape: tuple[int, ...]) -> Labelled:
    images, labels = np.empty((len(examples), *shape), np.uint8), np.empty(len(examples), np.uint8)
    for i, example in enumerate(examples):
        images[i], labels[i] = example["image"], example["label"]
    return Labelled(images, labels)
