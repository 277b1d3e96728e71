"""Causal convolution with a filter of few taps: y_t = sum_{k=0..K-1} h_k u_{t-k}.

Axes: G groups of channels, w channels of a group, C filters, J = w / C neighbouring channels that share a
filter, B batch, L length, T new tokens, K taps, S steps of a block. Every form computes in float32 (float64
stays float64) and returns the dtype of u.

For a handful of taps, sums of shifted products; for more, products of blocks of S inputs with the filter's
banded Toeplitz matrix, as in the two-stage blocked convolution of StripedHyena 2 (Ku et al. 2025, arXiv
2503.01868, section 3), where these are faster than a Fourier transform.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.ops.derivatives import own_derivative
from hyena_jax.ops.long_conv import Convolution, blockwise_conv, fft_conv
from hyena_jax.ops.online_conv import OnlineConvolution
from hyena_jax.ops.short_conv import short_conv

# Measured on a CPU, forward and backward, against the Fourier transform: shifted products take 0.01 to 0.5 of
# its time up to 16 taps, and blocks 0.2 to 0.8 of it at 32. With 128 taps blocks take 0.5 to 0.9 where 16
# channels share a filter and L = 8192, but more than the transform at L = 1024 or where none share.
MOST_SHIFTS, MOST_IN_BLOCKS, LEAST_SHARED, LEAST_LEN = 16, 32, 8, 4096


class FewTaps(NamedTuple):
    """The filters of a state, `taps` [F, w, K] with the skips in lag 0."""

    taps: jax.Array


def few_taps_conv(
    u: jax.Array,
    h: jax.Array,
    skip: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    method: Convolution | None = None,
) -> jax.Array:
    """y = h * u + skip ⊙ u, causal.

    Args:
      u: input [G, w, B, L].
      h: filters [C, K]; channels c J .. c J + J - 1 of a group have filter c.
      skip: weights of the input itself [w].
      segment_ids: integers [B, L] or None. A tap counts only where its input has the output's id; sums of
        shifted products, also of many taps.
      method: the Fourier form, for more taps; as in `long_conv.long_conv`.

    Returns:
      y [G, w, B, L].
    """
    (_, width, batch, length), (n_filters, _) = u.shape, h.shape
    n_shared, n_taps = width // n_filters, min(h.shape[1], length)
    h = h[:, :n_taps]
    dtype = jnp.float64 if jnp.float64 in (u.dtype, h.dtype) else jnp.float32
    wide, h = u.astype(dtype), h.astype(dtype)
    if segment_ids is not None:
        h = jnp.repeat(h, n_shared, axis=0)
        if skip is not None:
            h = h.at[:, 0].add(skip.astype(dtype))
        y = short_conv(wide, h.T[..., None, None], jnp.zeros((), dtype), -1, None, segment_ids)
        return y.astype(u.dtype)
    if n_taps > MOST_IN_BLOCKS and (n_shared < LEAST_SHARED or length < LEAST_LEN):
        return blockwise_conv(u, jnp.pad(h, [(0, 0), (0, length - n_taps)]), skip, method=method)
    if skip is not None and n_shared == 1:
        h = h.at[:, 0].add(skip.astype(dtype))
    convolve = shifted_conv if n_taps <= MOST_SHIFTS else blocked_conv
    y = convolve(wide.reshape(-1, n_filters, n_shared * batch, length), h).reshape(u.shape)
    if skip is not None and n_shared > 1:
        y = y + skip.astype(dtype)[:, None, None] * wide
    return y.astype(u.dtype)


def shifted_conv(u: jax.Array, h: jax.Array) -> jax.Array:
    """u [G, C, R, L] with h [C, K]: K shifted products, which XLA fuses.

    The gradient of the taps comes from `blocked_conv`: K sums over the rows would take up to nine times as
    long on a CPU, at 7 taps.
    """
    return own_derivative(_shifted, _shifted_pull_back)(u, h)


def _shifted(u: jax.Array, h: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    length = u.shape[-1]
    delayed = (
        jnp.pad(u[..., : length - k], [(0, 0), (0, 0), (0, 0), (k, 0)])
        for k in range(min(h.shape[1], length))
    )
    return sum(h[:, k, None, None] * inputs for k, inputs in enumerate(delayed)), (u, h)


def _shifted_pull_back(
    residuals: tuple[jax.Array, jax.Array], y_bar: jax.Array
) -> tuple[jax.Array, jax.Array]:
    u, h = residuals
    advanced = (
        jnp.pad(y_bar[..., k:], [(0, 0), (0, 0), (0, 0), (0, k)]) for k in range(min(h.shape[1], u.shape[-1]))
    )
    u_bar = sum(h[:, k, None, None] * y_bar_k for k, y_bar_k in enumerate(advanced))
    (h_bar,) = jax.vjp(partial(blocked_conv, u), h)[1](y_bar)
    return u_bar, h_bar


def blocked_conv(u: jax.Array, h: jax.Array) -> jax.Array:
    """u [G, C, R, L] with h [C, K]: each block of S >= K outputs from its own and the block before it."""
    *lead, length = u.shape
    size = max(8, 1 << (h.shape[1] - 1).bit_length())
    n_blocks = -(-length // size)
    now = jnp.pad(u, [(0, 0), (0, 0), (0, 0), (0, n_blocks * size - length)]).reshape(*lead, n_blocks, size)
    before = jnp.pad(now, [(0, 0), (0, 0), (0, 0), (1, 0), (0, 0)])[..., :-1, :]
    earlier, own = jnp.split(_band(h, size), 2, axis=-1)
    product = partial(jnp.einsum, "gcrnj,ctj->gcrnt", precision="highest")
    return (product(now, own) + product(before, earlier)).reshape(*lead, -1)[..., :length]


def _band(h: jax.Array, size: int) -> jax.Array:
    """[C, S, 2 S] with h_{S+t-j} at (t, j), where that is a tap of h [C, K]: see `long_conv.toeplitz`."""
    n_filters, n_taps = h.shape
    first = jnp.pad(h[:, ::-1], [(0, 0), (size - n_taps + 1, size)])
    repeated = jnp.broadcast_to(first[:, None], (n_filters, size, 2 * size + 1)).reshape(n_filters, -1)
    return repeated[:, : 2 * size * size].reshape(n_filters, size, 2 * size)


def empty(
    h: jax.Array, skip: jax.Array | None, batch_size: int, width: int
) -> tuple[FewTaps, tuple[jax.Array, ...]]:
    """Filters h [F, w, K] with skips [F, w], and of each the last inputs [B, W, K-1], oldest first: 0."""
    if skip is not None:
        h = h.at[..., 0].add(skip)
    shape = (batch_size, width, h.shape[-1] - 1)
    return FewTaps(h), tuple(jnp.zeros(shape, h.dtype) for _ in h)


def step(filters: FewTaps, inputs: tuple[jax.Array, ...]) -> OnlineConvolution:
    """The convolution of one token u [W, B, 1]."""

    def convolve(u: jax.Array, o: int) -> tuple[jax.Array, jax.Array]:
        seen = jnp.concatenate([inputs[o], u.swapaxes(0, 1).astype(inputs[o].dtype)], axis=-1)
        h = filters.taps[o]
        y = (seen.reshape(len(seen), -1, *h.shape) * h[:, ::-1]).sum(-1)
        return y.reshape(seen.shape[:2]).T[..., None].astype(u.dtype), seen[..., 1:]

    return convolve


def prefill(filters: FewTaps, inputs: tuple[jax.Array, ...]) -> OnlineConvolution:
    """The convolution of the next tokens u [W, B, T]."""

    def convolve(u: jax.Array, o: int) -> tuple[jax.Array, jax.Array]:
        before, h = inputs[o].swapaxes(0, 1), filters.taps[o]
        seen = jnp.concatenate([before, u.astype(before.dtype)], axis=-1)
        n_before, n_tokens = before.shape[-1], u.shape[-1]
        y = few_taps_conv(seen.reshape(-1, len(h), *seen.shape[1:]), h, method=fft_conv).reshape(seen.shape)
        return y[..., n_before:].astype(u.dtype), seen[..., n_tokens:].swapaxes(0, 1)

    return convolve
