"""Depthwise causal FIR filter: y_t = bias + sum_{k=0..K-1} taps_k x_{t-k}.

K taps. Any one axis of x is time; the caller chooses the other axes, and taps and bias broadcast against
them. Tap 0 multiplies the current input, as in the long convolution; libraries that cross-correlate store
the taps in the opposite order.

Written as K shifted products, also in the backward pass: on a CPU many times faster than a grouped
convolution. A shift is a padded slice, which XLA fuses with the operations after it; XLA fuses neither a
slice of a padded array nor JAX's own transpose of either.
"""

import jax
import jax.numpy as jnp

from hyena_jax.ops.fast.derivatives import own_derivative, sum_to


def short_conv(
    x: jax.Array,
    taps: jax.Array,
    bias: jax.Array,
    axis: int,
    history: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Filters x along `axis`; returns the shape and dtype of x.

    Args:
      x: L inputs along `axis`.
      taps: [K, ...]; each tap [...], as the bias, broadcasts against x.
      history: the K - 1 inputs before x along `axis`, oldest first, else shaped as x; None if x starts the
        sequence, with the faster backward pass.
      segment_ids: integers that broadcast against x, L along `axis`. A tap counts only where its input has
        the output's id. Not together with a history, whose segment is unknown: ValueError.

    >>> x = jnp.array([1.0, 2, 3, 4]).reshape(1, 4, 1)  # [B, L, D]
    >>> short_conv(x, jnp.array([[1.0], [10.0]]), jnp.zeros(1), axis=1)[0, :, 0].tolist()
    [1.0, 12.0, 23.0, 34.0]
    """
    taps, bias = taps.astype(x.dtype), bias.astype(x.dtype)
    if history is None:
        # Counted from the last axis, as broadcasting does: segment_ids may have fewer axes.
        return _from_nothing(x, taps, bias, segment_ids, axis if axis < 0 else axis - x.ndim)
    if segment_ids is not None:
        raise ValueError("segment_ids must be None when history is given")
    length, n_taps = x.shape[axis], len(taps)
    seen = jnp.concatenate([history.astype(x.dtype), x], axis)
    delayed = (
        jax.lax.slice_in_dim(seen, n_taps - 1 - k, n_taps - 1 - k + length, axis=axis) for k in range(n_taps)
    )
    return bias + sum(tap * inputs for tap, inputs in zip(taps, delayed, strict=True))


def advance_history(history: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """The history [..., K - 1, ...] after the inputs x [..., L, ...]: the last K - 1 along `axis`."""
    kept, seen = history.shape[axis], jnp.concatenate([history, x.astype(history.dtype)], axis)
    return jax.lax.slice_in_dim(seen, seen.shape[axis] - kept, None, axis=axis)


def _from_nothing(
    x: jax.Array, taps: jax.Array, bias: jax.Array, segment_ids: jax.Array | None, axis: int
) -> jax.Array:
    def forward(ids: jax.Array | None, x: jax.Array, taps: jax.Array, bias: jax.Array) -> tuple:
        y = bias + sum(tap * _delay(x, k, axis, ids) for k, tap in enumerate(taps))
        return y, (ids, x, taps, bias)

    def pull_back(residuals: tuple, y_bar: jax.Array) -> tuple[jax.Array, ...]:
        segment_ids, x, taps, bias = residuals
        # Both gradients use a shifted y_bar; with a delayed x, the forward pass would write it to memory.
        advanced = [_delay(y_bar, k, axis, segment_ids, transpose=True) for k in range(len(taps))]
        x_bar = sum(tap * y_bar_k for tap, y_bar_k in zip(taps, advanced, strict=True))
        taps_bar = [sum_to(x * y_bar_k, taps.shape[1:]) for y_bar_k in advanced]
        return x_bar, jnp.stack(taps_bar), sum_to(y_bar, bias.shape)

    return own_derivative(forward, pull_back, segment_ids)(x, taps, bias)


def _delay(
    x: jax.Array, k: int, axis: int, segment_ids: jax.Array | None, transpose: bool = False
) -> jax.Array:
    """x_{t-k} at t, or x_{t+k} with `transpose`; 0 beyond the ends and across segments."""
    length = x.shape[axis]
    k = min(k, length)

    def cut(x: jax.Array, first: int) -> jax.Array:
        return jax.lax.slice_in_dim(x, first, first + length - k, axis=axis)

    def pad(x: jax.Array) -> jax.Array:
        end = (0, k) if transpose else (k, 0)
        return jnp.pad(x, [end if i == axis else (0, 0) for i in range(-x.ndim, 0)])

    delayed = pad(cut(x, k if transpose else 0))
    if segment_ids is None or k == 0:
        return delayed
    return jnp.where(pad(cut(segment_ids, k) == cut(segment_ids, 0)), delayed, 0)
