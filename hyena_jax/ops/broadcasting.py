"""What a derivative needs where arrays were broadcast."""

import jax


def sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums x over the axes along which an array of `shape` was broadcast to the shape of x."""
    aligned = (1,) * (x.ndim - len(shape)) + tuple(shape)
    # Also over axes of one entry: XLA for CPUs sums [C, 1, L] over both at once ten times faster than over L.
    axes = tuple(i for i, size in enumerate(aligned) if size == 1)
    return x.sum(axes, keepdims=True).reshape(shape)
