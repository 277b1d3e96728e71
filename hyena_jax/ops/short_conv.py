"""Depthwise causal FIR filter: y_t = bias + sum_{k=0..K-1} taps_k x_{t-k}.

Axes: B batch, D channels, L length, K taps. Time is the last axis. Tap 0 multiplies the current input,
as in the long convolution; libraries that cross-correlate store the taps in the opposite order.
"""

import jax
import jax.numpy as jnp


def short_conv(x: jax.Array, taps: jax.Array, bias: jax.Array, history: jax.Array) -> jax.Array:
    """Filters x [B, D, L] with taps [D, K] and bias [D].

    `history` [B, D, K-1] holds the inputs before x, oldest first; zeros (`empty_history`) at the start of
    a sequence. Written as K shifted products: on CPU several times faster than a grouped convolution.
    """
    length, n_taps = x.shape[-1], taps.shape[-1]
    taps, bias = taps.astype(x.dtype), bias.astype(x.dtype)
    seen = jnp.concatenate([history.astype(x.dtype), x], axis=-1)
    y = bias[:, None]
    for k in range(n_taps):
        start = n_taps - 1 - k
        y = y + taps[:, k, None] * seen[..., start : start + length]
    return y


def empty_history(batch_size: int, channels: int, n_taps: int, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """The history [B, D, K-1] at the start of a sequence."""
    return jnp.zeros((batch_size, channels, n_taps - 1), dtype)


def advance_history(history: jax.Array, x: jax.Array) -> jax.Array:
    """The history [B, D, K-1] after the inputs x [B, D, L]."""
    kept = history.shape[-1]
    seen = jnp.concatenate([history, x.astype(history.dtype)], axis=-1)
    return seen[..., seen.shape[-1] - kept :]
