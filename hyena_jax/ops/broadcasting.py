"""What a derivative needs where arrays were broadcast."""

import jax


def sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums x over the axes along which an array of `shape` was broadcast to the shape of x."""
    aligned = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(i for i, size in enumerate(aligned) if size == 1 and x.shape[i] != 1)
    return x.sum(axes, keepdims=True).reshape(shape)
