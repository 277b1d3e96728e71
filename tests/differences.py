"""Gradients against central differences of an oracle in NumPy."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from tolerances import DIFFERENCE_TOLERANCE


def assert_equal_differences(
    gradients: Any,
    f: Callable[..., float],
    args: tuple,
    step: float = 1e-6,
    tolerance: float = DIFFERENCE_TOLERANCE,
) -> None:
    """Each leaf of `gradients`, with respect to `args`, along a random direction of its own."""
    leaves, structure = jax.tree.flatten(args)
    rng = np.random.default_rng(1)
    for i, (leaf, gradient) in enumerate(zip(leaves, jax.tree.leaves(gradients), strict=True)):
        direction = rng.standard_normal(np.shape(leaf))
        moved = [
            f(*structure.unflatten([*leaves[:i], leaf + change * direction, *leaves[i + 1 :]]))
            for change in (step, -step)
        ]
        expected = (moved[0] - moved[1]) / (2 * step)
        assert np.sum(gradient * direction) == pytest.approx(expected, rel=tolerance, abs=tolerance)
