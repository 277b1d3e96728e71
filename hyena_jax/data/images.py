"""Labelled images as batches: the `Dataset` of an `ImagesConfig`.

Shapes: B batch, H height, W width, C colours, n images.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hyena_jax.config import Experiment, ImagesConfig, UserError, require
from hyena_jax.data import loader
from hyena_jax.data.facts import fill_in
from hyena_jax.data.image_sources import Labelled, load_images

if TYPE_CHECKING:
    import grain


@dataclass(frozen=True)
class Normalization:
    """(x / 255 - mean) / std of a pixel x: one mean and one std for all positions and colours."""

    mean: float
    std: float

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Images uint8 of any shape, normalised to float32."""
        return self._values[images]

    @cached_property
    def _values(self) -> np.ndarray:
        """The result for each of the 256 pixel values."""
        return ((np.arange(256) / 255 - self.mean) / self.std).astype(np.float32)

    def to_json(self) -> dict[str, float]:
        """JSON values of this normalisation."""
        return {"mean": self.mean, "std": self.std}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Normalization":
        """The inverse of `to_json`. Raises UserError for other values."""
        try:
            mean, std = float(values["mean"]), float(values["std"])
            require(
                np.isfinite(mean) and 0 < std < np.inf, "mean and std", (mean, std), "finite, std above 0"
            )
            return cls(mean, std)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"must be what to_json returns, got {str(values)[:80]}: {error!r}", "normalization"
            ) from error


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
class ImageSet:
    """Images to train on and to evaluate on, with their origin: a `Dataset`."""

    kind: ClassVar[str] = "images"
    unit: ClassVar[str] = "image"
    units_per_row: ClassVar[int] = 1
    curves: ClassVar[Mapping[str, str]] = {"loss": "loss (nats per image)", "accuracy": "accuracy"}
    scores: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    tallies: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    train: Labelled
    held_out: Labelled
    normalization: Normalization
    fingerprint: str
    """SHA-256 of the normalisation and all images and labels, in hexadecimal."""
    source: str
    """Where the images came from, for people."""

    @property
    def n_held_out(self) -> int:
        """Held-out images."""
        return len(self.held_out.images)

    @property
    def n_classes(self) -> int:
        """The largest label of either part, plus one."""
        return 1 + int(max(self.train.labels.max(), self.held_out.labels.max()))

    def to_json(self) -> dict[str, Any]:
        """The fingerprint and normalisation, for `data.json` of a run."""
        return {"fingerprint": self.fingerprint, "normalization": self.normalization.to_json()}

    def complete(self, experiment: Experiment) -> Experiment:
        """Fills in image_size, channels and n_classes; refuses other values, except more classes."""
        *size, channels = self.train.images.shape[1:]
        facts = {"image_size": tuple(size), "channels": channels, "n_classes": self.n_classes}
        return fill_in(experiment, facts)

    def train_batches(
        self, batch_size: int, seed: int, part: int = 0, n_parts: int = 1
    ) -> "grain.MapDataset[loader.Batch]":
        """`loader.shuffled_batches` of `inputs` float32 [B, H, W, C] and `targets` int32 [B]."""
        n_rows = len(self.train.images)
        return loader.shuffled_batches(self._read_train, n_rows, batch_size, seed, part, n_parts)

    def _read_train(self, indices: np.ndarray) -> loader.Batch:
        return self._batch(self.train, indices)

    def _batch(self, part: Labelled, indices: np.ndarray) -> loader.Batch:
        return {
            "inputs": self.normalization(part.images[indices]),
            "targets": part.labels[indices].astype(np.int32),
        }

    def n_eval_rows(self, max_rows: int | None = None) -> int:
        """Images that `eval_batches` covers."""
        return len(loader.evenly_spaced(self.n_held_out, max_rows))

    def eval_batches(self, batch_size: int, max_rows: int | None = None) -> Iterator[loader.Batch]:
        """Every held-out image once, in order, or `max_rows` evenly spaced ones.

        Yields:
          `inputs` float32 [B, H, W, C], `targets` int32 [B], and `weights` float32 [B]: 1, or 0 where the
          last batch is padded (with the first image).
        """
        rows = loader.evenly_spaced(self.n_held_out, max_rows)
        for first in range(0, len(rows), batch_size):
            chosen = rows[first : first + batch_size]
            padded = np.pad(chosen, (0, batch_size - len(chosen)))
            weights = (np.arange(batch_size) < len(chosen)).astype(np.float32)
            yield {**self._batch(self.held_out, padded), "weights": weights}

    def loss_metrics(self, loss: float) -> dict[str, float]:
        """None: no metric is derived from nats per image."""
        return {}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Accuracy, if `correct` is among the sums."""
        return {"accuracy": sums["correct"] / sums["count"]} if "correct" in sums else {}

    def eval_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """None in addition to `metrics`."""
        return {}


def load_image_set(config: ImagesConfig, normalization: Normalization | None = None) -> ImageSet:
    """The images of `config`; normalization None fits one to the training part.

    Raises UserError if the images cannot be read, or all pixels of the training part are equal.
    """
    return image_set(*load_images(config), normalization)


def image_set(
    train: Labelled, held_out: Labelled, source: str, normalization: Normalization | None = None
) -> ImageSet:
    """The two parts as a data set; normalization None fits one to the training part."""
    if normalization is None:
        normalization = fit_normalization(train.images)
    fingerprint = _fingerprint(normalization, train, held_out)
    return ImageSet(train, held_out, normalization, fingerprint, source)


def _fingerprint(normalization: Normalization, *parts: Labelled) -> str:
    # The shapes put the border between the two parts into the digest.
    header = [normalization.to_json(), *(part.images.shape for part in parts)]
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for part in parts:
        digest.update(np.ascontiguousarray(part.images))
        digest.update(np.ascontiguousarray(part.labels))
    return digest.hexdigest()
