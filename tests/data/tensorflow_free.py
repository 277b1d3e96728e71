"""Preparing a data set needs TensorFlow; reading one must not."""

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

# Only searched for, since the import takes seconds.
_is_absent = not (find_spec("tensorflow") and find_spec("importlib_resources"))
_skip = pytest.mark.skipif(_is_absent, reason="needs tensorflow and importlib_resources, of the extra tfds")


def needs_tensorflow(test: Callable) -> Callable:
    """Marks a test that prepares a data set."""
    return pytest.mark.packages(_skip(test))


def prepare_fake(monkeypatch, feature: str, value: Any, **splits: list[dict]) -> None:
    """The data sets of every name are these splits of examples, whose only known feature has this value."""
    sizes = {
        name: SimpleNamespace(num_examples=len(split), num_bytes=sum(len(one[feature]) for one in split))
        for name, split in splits.items()
    }
    info = SimpleNamespace(features={feature: value}, splits=sizes, full_name="fake/1.0.0")
    ready = {"is_prepared": lambda: True, "as_data_source": lambda split: splits[split]}
    monkeypatch.setattr("tensorflow_datasets.builder", lambda name, **_: SimpleNamespace(info=info, **ready))


def prepare_texts(monkeypatch, **splits: list[str]) -> None:
    """The data sets of every name are these splits of texts."""
    import tensorflow_datasets as tfds

    examples = {
        name: [{"text": text.encode(), "label": 3} for text in texts] for name, texts in splits.items()
    }
    prepare_fake(monkeypatch, "text", tfds.features.Text(), **examples)


WITHOUT_TENSORFLOW = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: None if name == "tensorflow" else find_spec(name, *args)
"""
