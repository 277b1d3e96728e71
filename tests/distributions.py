"""Numbers that an initialiser draws against their distribution."""

import numpy as np
import pytest


def assert_drawn(values: np.ndarray, deviation: float, mean: float = 0.0) -> None:
    """Mean and standard deviation, within five standard errors of each."""
    assert np.std(values) == pytest.approx(deviation, rel=5 / np.sqrt(2 * values.size))
    assert np.mean(values) == pytest.approx(mean, abs=5 * deviation / np.sqrt(values.size))


def assert_uniform(values: np.ndarray) -> None:
    """On 0..1: the Kolmogorov-Smirnov statistic of uniform numbers exceeds this once in a million."""
    quantiles = np.linspace(0, 1, values.size)
    assert np.abs(np.sort(values) - quantiles).max() < 2.7 / np.sqrt(values.size)


def at(tree: dict, path: str) -> np.ndarray:
    """The leaf of a tree of parameters at names that are joined by slashes."""
    for name in path.split("/"):
        tree = tree[name]
    return tree
