"""TensorFlow is needed to prepare a data set, and must not be needed to read one."""

from importlib.util import find_spec

import pytest

# Looked for, not imported: that takes seconds.
needs_tensorflow = pytest.mark.skipif(
    not (find_spec("tensorflow") and find_spec("importlib_resources")),
    reason="tensorflow and importlib_resources, which prepare data sets, are absent",
)
WITHOUT_TENSORFLOW = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: None if name == "tensorflow" else find_spec(name, *args)
"""
