"""Preparing a data set needs TensorFlow; reading one must not."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest

# Only searched for, since the import takes seconds.
_is_absent = not (find_spec("tensorflow") and find_spec("importlib_resources"))
_skip = pytest.mark.skipif(_is_absent, reason="needs tensorflow and importlib_resources, of the extra tfds")


def needs_tensorflow(test: Callable) -> Callable:
    """Marks a test that prepares a data set."""
    return pytest.mark.packages(_skip(test))


WITHOUT_TENSORFLOW = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: None if name == "tensorflow" else find_spec(name, *args)
"""
