"""Convolution with the response of a small diagonal recurrence, in constant time and memory per token.

Axes: B batch, L length, T new tokens, w channels of a filter, G groups, W = G w, n modes, K steps of a block.

    y_t = Re sum_n R_n x_{n,t} + h_0 u_t,   x_{n,t+1} = lambda_n x_{n,t} + u_t

(Massaroli et al. 2023, arXiv 2310.18780), so that the state x holds earlier inputs only.
"""

from math import isqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.ops.long_conv import fft_conv, long_conv

# Steps that a prefill takes at once; this many powers of every mode are in memory.
BLOCK = 256


class Modes(NamedTuple):
    """A filter h_0 = lag_zero [..., w], h_t = Re sum_n weights_n lambda_n^(t-1).

    `weights` R and `log_modes`, which is ln lambda, are [..., w, n], complex, or real where all modes decay
    without oscillating.
    """

    log_modes: jax.Array
    weights: jax.Array
    lag_zero: jax.Array


def modal_taps(modes: Modes, length: int) -> jax.Array:
    """The first taps h [..., w, length]."""
    later = modal_response(modes.log_modes, modes.weights, length - 1)
    return jnp.concatenate([modes.lag_zero[..., None], later], axis=-1)


def modal_response(log_modes: jax.Array, weights: jax.Array, length: int) -> jax.Array:
    """Re sum_n weights exp(log_modes t) for t < length: [..., length] of weights and log_modes [..., n].

    With t = K q + r, modes^t is modes^(K q) modes^r: 2 sqrt(L) exponentials per mode instead of L, and the
    sum over n is a matrix product.
    """
    step = isqrt(max(length - 1, 0)) + 1
    n_steps = -(-length // step)
    time = jnp.arange(max(step, n_steps)).astype(log_modes.dtype)
    starts = weights[..., None] * jnp.exp(log_modes[..., None] * (step * time[:n_steps]))
    within = jnp.exp(log_modes[..., None] * time[:step])
    taps = _real_product("...nq,...nr->...qr", starts, within)
    return taps.reshape(*taps.shape[:-2], n_steps * step)[..., :length]


def with_skip(modes: Modes, skip: jax.Array | None) -> Modes:
    """The modes of one filter, with the skip [w] in lag 0."""
    return modes if skip is None else modes._replace(lag_zero=modes.lag_zero + skip)


def empty(modes: Modes, batch_size: int, width: int) -> jax.Array:
    """The state [B, W, n] before the first token."""
    return jnp.zeros((batch_size, width, modes.weights.shape[-1]), modes.weights.dtype)


def step(modes: Modes, state: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """y [W, B, 1] of one token u [W, B, 1], and the state after it."""
    width, batch, _ = u.shape
    now = u[..., 0].T.reshape(batch, -1, len(modes.weights)).astype(modes.lag_zero.dtype)
    before, decay = state.reshape(*now.shape, -1), jnp.exp(modes.log_modes)
    y = (modes.weights * before).real.sum(-1) + modes.lag_zero * now
    after = decay * before + now[..., None].astype(decay.dtype)
    return y.reshape(batch, width).T[..., None].astype(u.dtype), after.reshape(state.shape)


def prefill(modes: Modes, state: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """y [W, B, T] of the next tokens u [W, B, T], and the state after them, in O(T (log K + n))."""
    _, batch, length = u.shape
    inputs = u.reshape(-1, len(modes.weights), batch, length).astype(modes.lag_zero.dtype)
    groups = state.reshape(batch, -1, *modes.weights.shape).swapaxes(0, 1)
    whole = length - length % BLOCK
    blocks = jnp.moveaxis(inputs[..., :whole].reshape(*inputs.shape[:-1], -1, BLOCK), -2, 0)
    groups, y = jax.lax.scan(lambda groups, block: _block(modes, groups, block), groups, blocks)
    y = jnp.moveaxis(y, 0, -2).reshape(*inputs.shape[:-1], whole)
    if whole < length:
        groups, rest = _block(modes, groups, inputs[..., whole:])
        y = jnp.concatenate([y, rest], axis=-1)
    return y.reshape(u.shape).astype(u.dtype), groups.swapaxes(0, 1).reshape(state.shape)


def _block(modes: Modes, state: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The states [G, B, w, n] after the inputs u [G, w, B, K], and y [G, w, B, K]."""
    length = u.shape[-1]
    # lambda^0 .. lambda^K, [w, n, K+1].
    time = jnp.arange(length + 1).astype(modes.log_modes.dtype)
    powers = jnp.exp(modes.log_modes[..., None] * time)
    earlier = _real_product("gbwn,wnk->gwbk", state * modes.weights, powers[..., :-1])
    y = long_conv(u, modal_taps(modes, length)[:, None], method=fft_conv) + earlier
    newest_last = powers[..., -2::-1]
    added = jnp.einsum("gwbk,wnk->gbwn", u, newest_last.real, precision="highest")
    if jnp.iscomplexobj(newest_last):
        added = jax.lax.complex(added, jnp.einsum("gwbk,wnk->gbwn", u, newest_last.imag, precision="highest"))
    return powers[..., -1] * state + added, y


def _real_product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The real part of an einsum of two arrays, both complex or both real."""
    product = jnp.einsum(axes, a.real, b.real, precision="highest")
    if not jnp.iscomplexobj(a):
        return product
    return product - jnp.einsum(axes, a.imag, b.imag, precision="highest")
