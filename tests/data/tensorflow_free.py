"""Preparing a data set needs TensorFlow; reading one must not."""

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

# Only searched for, since the import takes seconds.
_is_absent = not (find_spec("tensorflow") and find_spec("importlib_resources"))
_skip = pytest.mark.skipif(_is_absent, reason="needs tensorflow and importlib_resources, of the extra tfds")


def needs_tensorflow(test: Callable) -> Callable:
    """Marks a test that prepares a data set."""
    return pytest.mark.packages(_skip(test))


class Split(list):
    @property
    def num_examples(self) -> int:
        return len(self)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self))


class FakeBuilder:
    """A prepared data set of texts."""

    def __init__(self, **splits: list[str]):
        import tensorflow_datasets as tfds

        features = {"text": tfds.features.Text()}
        splits = {name: Split(texts) for name, texts in splits.items()}
        self.info = SimpleNamespace(features=features, splits=splits, full_name="fake/1.0.0")

    def is_prepared(self) -> bool:
        return True

    def as_data_source(self, split: str) -> list[dict]:
        return [{"text": text.encode(), "label": 3} for text in self.info.splits[split]]


def prepare_fake(monkeypatch, **splits: list[str]) -> None:
    """The data sets of every name are these splits."""
    monkeypatch.setattr("tensorflow_datasets.builder", lambda name, **options: FakeBuilder(**splits))


WITHOUT_TENSORFLOW = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: None if name == "tensorflow" else find_spec(name, *args)
"""
