"""Preparing a data set needs TensorFlow; reading one must not."""

from importlib.util import find_spec

import pytest

# Only searched for, since the import takes seconds.
needs_tensorflow = pytest.mark.skipif(
    not (find_spec("tensorflow") and find_spec("importlib_resources")),
    reason="tensorflow and importlib_resources, which prepare data sets, are absent",
)
WITHOUT_TENSORFLOW = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: None if name == "tensorflow" else find_spec(name, *args)
"""
