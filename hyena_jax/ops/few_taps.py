"""Causal convolution with a filter of few taps: y_t = sum_{k=0..K-1} h_k u_{t-k}.

Axes: G groups of channels, w channels of a group, B batch, L length, T new tokens, K taps, S outputs of a
window. Every form computes in float32 (float64 stays float64) and returns the dtype of u.

A few taps are sums of shifted products; a few more are products of windows of the input with the filter's
banded Toeplitz matrix, the two-stage blocked convolution of StripedHyena 2 (Ku et al. 2025, arXiv 2503.01868,
section 3); many are a Fourier transform, as in `long_conv`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.ops.long_conv import Convolution, blockwise_conv, fft_conv
from hyena_jax.ops.short_conv import short_conv

# The most taps that are summed, and the most in windows. Measured on a CPU inside of Hyena, forward and
# backward at D = 256: what the convolution adds to the rest takes 0.2 to 0.6 of the Fourier form's time with
# 3 taps in sums, 0.3 to 0.5 with 7 in windows, 0.6 (L = 8192) to 1.4 (L = 1024) with 16, and 1.4 to 2.5 with
# 128.
MAX_SUMMED, MAX_IN_WINDOWS = 4, 16
# Outputs S of a window, at least MAX_IN_WINDOWS - 1.
WINDOW = 16


class FewTaps(NamedTuple):
    """The filter of a state, `taps` [w, K] with the skip in lag 0."""

    taps: jax.Array


def few_taps_conv(
    u: jax.Array,
    h: jax.Array,
    skip: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    method: Convolution | None = None,
) -> jax.Array:
    """y = h * u + skip ⊙ u, causal, for u [G, w, B, L], h [w, K] and skip [w].

    Args:
      segment_ids: integers [B, L]; a tap counts only where its input has the output's id; always sums.
      method: the Fourier form, for more taps; as in `long_conv.long_conv`.
    """
    length, dtype = u.shape[-1], jnp.float64 if jnp.float64 in (u.dtype, h.dtype) else jnp.float32
    wide, h = u.astype(dtype), h[:, :length].astype(dtype)
    if skip is not None:
        h = h.at[:, 0].add(skip.astype(dtype))
    n_taps = h.shape[1]
    if segment_ids is not None or n_taps <= MAX_SUMMED:
        y = short_conv(wide, h.T[..., None, None], jnp.zeros((), dtype), -1, None, segment_ids)
    elif n_taps <= MAX_IN_WINDOWS:
        y = windowed_conv(wide, h)
    else:
        y = blockwise_conv(u, jnp.pad(h, [(0, 0), (0, length - n_taps)]), method=method)
    return y.astype(u.dtype)


def windowed_conv(u: jax.Array, h: jax.Array) -> jax.Array:
    """u [G, w, B, L] with h [w, K]: S outputs at a time from the S inputs there and the K - 1 before them."""
    *lead, length = u.shape
    n_before, n_windows = h.shape[1] - 1, -(-length // WINDOW)
    own = jnp.pad(u, [(0, 0), (0, 0), (0, 0), (0, n_windows * WINDOW - length)])
    own = own.reshape(*lead, n_windows, WINDOW)
    before = jnp.pad(own[..., :-1, WINDOW - n_before :], [(0, 0), (0, 0), (0, 0), (1, 0), (0, 0)])
    windows = jnp.concatenate([before, own], axis=-1)
    y = jnp.einsum("gwbnj,wsj->gwbns", windows, _band(h), precision="highest")
    return y.reshape(*lead, -1)[..., :length]


def _band(h: jax.Array) -> jax.Array:
    """[w, S, K-1+S] with h_{K-1+s-j} at (s, j), where that is a tap of h [w, K]: see `long_conv.toeplitz`."""
    channels, n_taps = h.shape
    width = n_taps - 1 + WINDOW
    first = jnp.pad(h[:, ::-1], [(0, 0), (0, width + 1 - n_taps)])
    repeated = jnp.broadcast_to(first[:, None], (channels, WINDOW, width + 1)).reshape(channels, -1)
    return repeated[:, : WINDOW * width].reshape(channels, WINDOW, width)


def with_skip(h: jax.Array, skip: jax.Array | None) -> FewTaps:
    """The filter h [w, K], with the skip [w] in lag 0."""
    return FewTaps(h if skip is None else h.at[..., 0].add(skip))


def empty(filter: FewTaps, batch_size: int, width: int) -> jax.Array:
    """The last inputs [B, W, K-1] before the first token, oldest first: 0."""
    return jnp.zeros((batch_size, width, filter.taps.shape[-1] - 1), filter.taps.dtype)


def step(filter: FewTaps, inputs: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """y [W, B, 1] of one token u [W, B, 1], and the last inputs after it."""
    seen, h = jnp.concatenate([inputs, u.swapaxes(0, 1).astype(inputs.dtype)], axis=-1), filter.taps
    y = (seen.reshape(len(seen), -1, *h.shape) * h[:, ::-1]).sum(-1)
    return y.reshape(seen.shape[:2]).T[..., None].astype(u.dtype), seen[..., 1:]


def prefill(filter: FewTaps, inputs: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """y [W, B, T] of the next tokens u [W, B, T], and the last inputs after them."""
    before, h = inputs.swapaxes(0, 1), filter.taps
    seen = jnp.concatenate([before, u.astype(before.dtype)], axis=-1)
    n_before, n_tokens = before.shape[-1], u.shape[-1]
    y = few_taps_conv(seen.reshape(-1, len(h), *seen.shape[1:]), h, method=fft_conv).reshape(seen.shape)
    return y[..., n_before:].astype(u.dtype), seen[..., n_tokens:].swapaxes(0, 1)
