"""Errors beside their bounds, and the comparison with a float64 oracle."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.benchmark.verify import TOLERANCE, relative_error

Tree = Any

BOUNDS = {
    "value": TOLERANCE["float32"],
    "gradient": 2e-5,
    "forward mode": 2e-5,
    "update": 1e-4,
    "decoding": TOLERANCE["float32"],
    "documents": TOLERANCE["float32"],
    "bfloat16": TOLERANCE["bfloat16"],
    "bfloat16 decoding": TOLERANCE["bfloat16"],
    "same bits": 0.0,
}
"""By what is checked, the largest error that counts as right, relative to the largest value."""
STEP = 1e-6
"""Of central differences, in float64: they are right to about 1e-9."""


class Fact(NamedTuple):
    """One comparison; `error` is relative to the largest value."""

    what: str
    """Of BOUNDS."""
    error: float
    note: str = ""
    """What there is to say besides the error."""

    @property
    def holds(self) -> bool:
        """False of an error that is not a number, too."""
        return self.error <= BOUNDS[self.what]


Check = Callable[[], Iterator[Fact]]


def against_oracle(
    f: Callable[..., Tree], oracle: Callable[..., Tree], args: tuple, has_forward_mode: bool = True
) -> Iterator[Fact]:
    """Compares f with its oracle: values, and derivatives of both modes along one random direction.

    The oracle computes values alone, so that derivatives are compared with central differences of it. Every
    array of `args`, trees of float32, moves by an amount that changes the result about as much as any other.
    """
    rng = np.random.default_rng(7)
    leaves, structure = jax.tree.flatten(args)

    def exact(move: float = 0.0, direction: list | None = None) -> list[np.ndarray]:
        moved = [
            np.float64(x) + (0 if direction is None else move * d)
            for x, d in zip(leaves, direction or leaves, strict=True)
        ]
        return jax.tree.leaves(oracle(*structure.unflatten(moved)))

    expected = exact()
    weights = [rng.standard_normal(y.shape, np.float32) for y in expected]
    normal = [rng.standard_normal(x.shape, np.float32) for x in leaves]

    def values(leaves: list) -> list[jax.Array]:
        return jax.tree.leaves(f(*structure.unflatten(leaves)))

    @jax.jit
    def run(leaves: list) -> tuple:
        y, pull_back = jax.vjp(values, leaves)
        (gradients,) = pull_back([w.astype(x.dtype) for w, x in zip(weights, y, strict=True)])
        sizes = [jnp.clip(1 / jnp.sqrt((g * g).sum()), 1e-2, 1e2) for g in gradients]
        direction = [n * size for n, size in zip(normal, sizes, strict=True)]
        tangent = jax.jvp(values, (leaves,), (direction,))[1] if has_forward_mode else None
        return y, gradients, direction, tangent

    found, again = (jax.device_get(run(leaves)) for _ in range(2))
    y, gradients, direction, tangent = found
    yield Fact("value", largest(map(relative_error, y, expected)))
    later, earlier = (exact(sign * STEP, direction) for sign in (1, -1))
    slopes = [(a - b) / (2 * STEP) for a, b in zip(later, earlier, strict=True)]
    parts = [float((np.float64(g) * d).sum()) for g, d in zip(gradients, direction, strict=True)]
    slope = sum(float((w * s).sum()) for w, s in zip(weights, slopes, strict=True))
    yield Fact("gradient", abs(sum(parts) - slope) / max(sum(map(abs, parts)), 1e-30))
    if tangent is not None:
        yield Fact("forward mode", largest(map(relative_error, tangent, slopes)))
    if not have_equal_bits(found, again):
        yield Fact("same bits", 0.0, "two runs differ in bits: an operation is not deterministic here")


def largest(errors: Iterable[float]) -> float:
    """NaN if one of them is, which Python's `max` may overlook."""
    return float(np.max([*errors]))


def have_equal_bits(a: Tree, b: Tree) -> bool:
    """Whether two trees of NumPy arrays are the same, NaNs too."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
