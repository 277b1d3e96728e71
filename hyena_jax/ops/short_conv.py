"""Depthwise causal FIR filter: y_t = bias + sum_{k=0..K-1} taps_k x_{t-k}.

Axes: B batch, D channels, L length, K taps. Time is the last axis. Tap 0 multiplies the current input,
as in the long convolution; libraries that cross-correlate store the taps in the opposite order.
"""

import jax
import jax.numpy as jnp


def short_conv(
    x: jax.Array,
    taps: jax.Array,
    bias: jax.Array,
    history: jax.Array,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Filters x [B, D, L] with taps [D, K] and bias [D]; returns [B, D, L] in the dtype of x.

    `history` [B, D, K-1] holds the inputs before x, oldest first; zeros (`empty_history`) at the start of
    a sequence. With `segment_ids` [B, L] a tap counts only where its input carries the output's id; the
    history belongs to the segment of the first input.

    Written as K shifted products: on CPU several times faster than a grouped convolution.
    """
    length, n_taps = x.shape[-1], taps.shape[-1]
    taps, bias = taps.astype(x.dtype), bias.astype(x.dtype)
    seen = jnp.concatenate([history.astype(x.dtype), x], axis=-1)
    if segment_ids is not None:
        seen_ids = jnp.pad(segment_ids, ((0, 0), (n_taps - 1, 0)), mode="edge")
    y = bias[:, None]
    for k in range(n_taps):
        start = n_taps - 1 - k
        delayed = seen[..., start : start + length]
        if segment_ids is not None:
            same = seen_ids[:, start : start + length] == segment_ids
            delayed = jnp.where(same[:, None], delayed, 0)
        y = y + taps[:, k, None] * delayed
    return y


def empty_history(batch_size: int, channels: int, n_taps: int, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """The history [B, D, K-1] at the start of a sequence."""
    return jnp.zeros((batch_size, channels, n_taps - 1), dtype)


def advance_history(history: jax.Array, x: jax.Array) -> jax.Array:
    """The history [B, D, K-1] after the inputs x [B, D, L]."""
    kept = history.shape[-1]
    seen = jnp.concatenate([history, x.astype(history.dtype)], axis=-1)
    return seen[..., seen.shape[-1] - kept :]
