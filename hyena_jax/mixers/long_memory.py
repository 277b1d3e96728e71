"""What mixers with long filters have in common: the state, and how their convolutions run on from it.

Axes: B batch, L length, T new tokens, S longest length of a state, F filters, G groups of channels that
share filters, w channels of a group, W = G w, K taps.

Such a mixer is a function

    mix(x [B, T, D], short_history, real, convolve, deterministic) -> y, short_history, long_history

around its long convolutions, which it leaves to `convolve`. The functions here call it with the
`convolve` that the parallel form, a prefill or a single step needs. Inside, channels come first, [W, B, T]
(`hyena_jax.ops.dense` says why); of a state, the batch does, as of every mixer's.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.mixers.inputs import is_real
from hyena_jax.ops.long_conv import long_conv
from hyena_jax.ops.short_conv import empty_history


class Shared(NamedTuple):
    """What the batch has in common: filters with the skips in lag 0 [F, w, S], tokens seen []."""

    filters: jax.Array
    position: jax.Array


class LongState(NamedTuple):
    """The first real position of each row [B], inputs of the short FIR [B, C, K-1], and of each long
    convolution [B, F, W, S], float32."""

    shared: Shared
    first: jax.Array
    short_history: jax.Array
    long_history: jax.Array


# One long convolution: (u [W, B, T], filter index) -> (y [W, B, T], history after u [B, W, S] or None).
Convolve = Callable[[jax.Array, int], tuple[jax.Array, jax.Array | None]]
# See the module's docstring; the histories are None in the parallel form.
Mix = Callable[..., tuple[jax.Array, jax.Array | None, jax.Array | None]]


def parallel(
    h: jax.Array, skip: jax.Array | None, block_len: int | None = None, future: jax.Array | None = None
) -> Convolve:
    """Convolution of a whole sequence with h [F, w, L] and skips [F, w], in blocks of `block_len` alone.

    With `future` [F, w, L] also of the sequence turned round, so that lag 0 counts in both.
    """

    def convolve(u: jax.Array, o: int) -> tuple[jax.Array, None]:
        backward = None if future is None else future[o]
        return _blockwise(u, h[o], None if skip is None else skip[o], block_len, backward), None

    return convolve


def init_state(
    filters: jax.Array, skip: jax.Array | None, batch_size: int, width: int, short: tuple[int, int]
) -> LongState:
    """The state before the first token.

    Args:
      filters: h [F, w, S].
      skip: [F, w], added to lag 0.
      width: W.
      short: channels C and taps K of the short FIR; (0, 1) where there is none.
    """
    if skip is not None:
        filters = filters.at[..., 0].add(skip)
    return LongState(
        shared=Shared(filters, jnp.zeros((), jnp.int32)),
        first=jnp.zeros(batch_size, jnp.int32),
        short_history=empty_history(batch_size, *short, filters.dtype),
        long_history=jnp.zeros((batch_size, len(filters), width, filters.shape[-1]), filters.dtype),
    )


def prefill(
    mix: Mix, state: LongState, x: jax.Array, lengths: jax.Array | None, block_len: int | None = None
) -> tuple[LongState, jax.Array]:
    """The next T tokens x [B, T, D] at once: an FFT over the whole history."""
    n_tokens = x.shape[1]
    filters, position = state.shared
    first = state.first if lengths is None else n_tokens - lengths

    def convolve(u: jax.Array, o: int) -> tuple[jax.Array, jax.Array]:
        history = _write(state.long_history[:, o], u, position)
        # Blocks count from a row's first real token.
        aligned = history if block_len is None else _roll_rows(history, -first)
        y = _blockwise(aligned.swapaxes(0, 1), filters[o], block_len=block_len).swapaxes(0, 1)
        y = y if block_len is None else _roll_rows(y, first)
        y = jax.lax.dynamic_slice_in_dim(y, position, n_tokens, axis=-1)
        return y.swapaxes(0, 1).astype(u.dtype), history

    y, *memory = _mix_on(mix, state, x, is_real(lengths, n_tokens), convolve)
    return LongState(Shared(filters, position + n_tokens), first, *memory), y


def step(
    mix: Mix, state: LongState, x: jax.Array, block_len: int | None = None
) -> tuple[LongState, jax.Array]:
    """The next token x [B, D]: one product with the history for each filter, O(S)."""
    filters, position = state.shared

    def convolve(u: jax.Array, o: int) -> tuple[jax.Array, jax.Array]:
        history = _write(state.long_history[:, o], u, position)
        # Lag 0 of the reversed filter moves to `position`; what wraps round meets zeros.
        kernel = jnp.roll(filters[o][:, ::-1], position + 1, axis=-1)
        seen = history
        if block_len is not None:
            age = (position - state.first) % block_len
            in_block = jnp.arange(history.shape[-1]) >= (position - age)[:, None]
            seen = jnp.where(in_block[:, None], history, 0)
        seen = seen.reshape(len(seen), -1, *kernel.shape)
        y = jnp.einsum("bgws,ws->gwb", seen, kernel).reshape(u.shape)
        return y.astype(u.dtype), history

    y, *memory = _mix_on(mix, state, x[:, None], None, convolve)
    return LongState(Shared(filters, position + 1), state.first, *memory), y[:, 0]


def _mix_on(
    mix: Mix, state: LongState, x: jax.Array, real: jax.Array | None, convolve: Convolve
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`mix` of the next tokens x [B, T, D]: y, and both histories with the batch first."""
    y, short_history, long_history = mix(x, state.short_history.swapaxes(0, 1), real, convolve, True)
    return y, short_history.swapaxes(0, 1), long_history


def _blockwise(
    u: jax.Array,
    h: jax.Array,
    skip: jax.Array | None = None,
    block_len: int | None = None,
    future: jax.Array | None = None,
) -> jax.Array:
    """y [W, B, L] of u [W, B, L] and h [w, >= L]; each block of `block_len` steps is convolved alone."""
    width, batch, length = u.shape
    taps = min(length, block_len or length)
    n_blocks = -(-length // taps)
    u = jnp.pad(u, [(0, 0), (0, 0), (0, n_blocks * taps - length)])
    u = u.reshape(-1, len(h), batch * n_blocks, taps)
    y = long_conv(u, h[:, None, :taps], None if skip is None else skip[:, None])
    if future is not None:
        y = y + long_conv(u[..., ::-1], future[:, None, :taps])[..., ::-1]
    return y.reshape(width, batch, -1)[..., :length]


def _roll_rows(x: jax.Array, shifts: jax.Array) -> jax.Array:
    """x [B, W, S] with row b moved right by shifts[b], round the end."""
    return jax.vmap(lambda row, shift: jnp.roll(row, shift, axis=-1))(x, shifts)


def _write(history: jax.Array, u: jax.Array, position: jax.Array) -> jax.Array:
    """history [B, W, S] with u [W, B, T] from `position` on."""
    u = u.swapaxes(0, 1).astype(history.dtype)
    return jax.lax.dynamic_update_slice_in_dim(history, u, position, axis=-1)
