"""Long convolutions that remember all their inputs, for any filter.

Axes: B batch, T new tokens, S longest length of a state, F filters, w channels of a filter, W = G w, U inputs
of a tile. See `long_memory`, which calls this, and `hyena_jax.ops.online_conv`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.ops import online_conv
from hyena_jax.ops.long_conv import blockwise_conv
from hyena_jax.ops.online_conv import Window

Memory = tuple[jax.Array, ...]


class Tiles(NamedTuple):
    """Spectra [F, w, U+1] of every size U; positions [] where tiles began, and where the last one ended."""

    spectra: tuple[jax.Array, ...]
    origin: jax.Array
    start: jax.Array


class Taps(NamedTuple):
    """Filters [F, 2 S - 1, w] as of `online_conv.reversed_taps`.

    `block_len` [] is the steps of a block that is convolved alone, None where the sequence is one block;
    `tiles` is None where none are used.
    """

    taps: jax.Array
    block_len: jax.Array | None
    tiles: Tiles | None


def empty(
    h: jax.Array, skip: jax.Array | None, batch_size: int, width: int, block_len: int | None
) -> tuple[Taps, Memory]:
    """Filters h [F, w, S] with skips [F, w], and each one's memory [B, S, W] before the first token."""
    if skip is not None:
        h = h.at[..., 0].add(skip)
    block = None if block_len is None else jnp.asarray(block_len, jnp.int32)
    memory = tuple(jnp.zeros((batch_size, h.shape[-1], width), h.dtype) for _ in h)
    return Taps(online_conv.reversed_taps(h), block, None), memory


def prefill(
    filters: Taps, memory: Memory, position: jax.Array, first: jax.Array, block_len: int | None
) -> Callable:
    """The `Convolve` of the next tokens u [W, B, T]: an FFT over the whole history."""

    def convolve(u: jax.Array, o: int) -> tuple[jax.Array, jax.Array]:
        inputs = _write(memory[o], u, position)
        h = online_conv.filters(filters.taps[o])
        # Blocks count from a row's first real token.
        aligned = inputs if block_len is None else _roll_rows(inputs, -first)
        y = blockwise_conv(aligned.transpose(2, 0, 1), h, None, block_len)
        y = y if block_len is None else _roll_rows(y.transpose(1, 2, 0), first).transpose(2, 0, 1)
        return jax.lax.dynamic_slice_in_dim(y, position, u.shape[-1], axis=-1).astype(u.dtype), inputs

    return convolve


def step(
    filters: Taps, memory: Memory, later: Memory | None, position: jax.Array, first: jax.Array
) -> Callable:
    """The `Convolve` of one token u [W, B, 1]; `later` as of `open_tiles`."""
    begin = window(filters.block_len, position, first).begin

    def convolve(u: jax.Array, o: int) -> tuple[jax.Array, jax.Array]:
        inputs = _write(memory[o], u, position)
        taps = filters.taps[o]
        if later is None:
            y = online_conv.lazy_output(inputs, taps, position, begin)
        else:
            start = filters.tiles.start
            y = online_conv.near_output(inputs, later[o], taps, position, start, begin)
        return y.T[..., None].astype(u.dtype), inputs

    return convolve


def open_tiles(filters: Taps, memory: Memory, position: jax.Array, first: jax.Array) -> tuple[Taps, Memory]:
    """The filters with spectra, and for each what the inputs so far add to later outputs, [B, S, W]."""
    h = online_conv.filters(filters.taps)
    limits = window(filters.block_len, position, first)
    later = tuple(online_conv.open_tiles(inputs, h[o], position, limits) for o, inputs in enumerate(memory))
    return filters._replace(tiles=Tiles(online_conv.tile_spectra(h), position, position)), later


def absorb(
    filters: Taps, memory: Memory, later: Memory, position: jax.Array, first: jax.Array, size: int
) -> tuple[Taps, Memory]:
    """The filters and `later` after the tile of the last `size` inputs."""
    spectra, origin, start = filters.tiles
    n_steps = position - origin
    is_due = (n_steps & -n_steps == size) & (position - start == online_conv.TILE)
    # Out of turn, what later outputs get would be wrong: this start makes them NaN.
    tiles = Tiles(spectra, origin, jnp.where(is_due, position, -online_conv.TILE))
    limits = window(filters.block_len, position, first)
    spectrum = spectra[(size // online_conv.TILE).bit_length() - 1]
    later = tuple(
        online_conv.absorb(memory[o], later[o], spectrum[o], position, limits) for o in range(len(memory))
    )
    return filters._replace(tiles=tiles), later


def window(block_len: jax.Array | None, position: jax.Array, first: jax.Array) -> Window:
    """The block that `position` is in, of rows whose blocks count from `first` [B]."""
    if block_len is None:
        return Window(jnp.zeros((), jnp.int32), jnp.asarray(jnp.iinfo(jnp.int32).max))
    begin = position - (position - first) % block_len
    return Window(begin, begin + block_len)


def _roll_rows(x: jax.Array, shifts: jax.Array) -> jax.Array:
    """x [B, S, W] with row b moved right by shifts[b], round the end."""
    return jax.vmap(lambda row, shift: jnp.roll(row, shift, axis=0))(x, shifts)


def _write(inputs: jax.Array, u: jax.Array, position: jax.Array) -> jax.Array:
    """inputs [B, S, W] with u [W, B, T] from `position` on."""
    u = u.transpose(1, 2, 0).astype(inputs.dtype)
    return jax.lax.dynamic_update_slice_in_dim(inputs, u, position, axis=1)
