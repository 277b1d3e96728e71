"""The convolution of `long_conv`, one output at a time and exactly: y_t = sum_{s=0..t} h_s u_{t-s}.

Axes: B batch, S longest length, W channels, w filters (W = G w, channel g w + c has filter c), U inputs of a
tile. Time comes before the channels here, [B, S, W]: a step then writes and reads whole rows.

Two ways to the same values:

- `lazy_output`: one product with the whole history, O(S) a step. It needs the inputs alone.
- tiles, O(log(S)^2) a step on average (relaxed multiplication: van der Hoeven 2002, Relax, but don't be too
  lazy; Oncescu et al. 2024, arXiv 2410.12982). Beside the inputs, `later` [B, S, W] holds what those of
  finished tiles add to later outputs, and `near_output` adds the inputs since the last tile to that. After
  every `TILE` steps, with n done and U the largest power of two that divides n, `absorb` adds the last U
  inputs to the U outputs that come next, by one FFT of 2 U points. No size is dynamic, so that nothing
  branches and no buffer is copied: who calls knows n.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.ops.broadcasting import sum_products
from hyena_jax.ops.long_conv import long_conv

# Steps from one tile to the next, a power of two; the inputs of so many steps are summed up directly.
TILE = 64


class Window(NamedTuple):
    """Which inputs count: those of a row from `begin` on, for outputs before `end`; int32 [B] or []."""

    begin: jax.Array
    end: jax.Array


def reversed_taps(h: jax.Array) -> jax.Array:
    """The taps [..., 2 S - 1, w] of h [..., w, S] as the inputs meet them: h_{S-1} .. h_0, then zeros.

    From entry S - 1 - t on, they are the weights of inputs 0, 1, .. in the output t.
    """
    zeros = jnp.zeros((*h.shape[:-1], h.shape[-1] - 1), h.dtype)
    return jnp.concatenate([h[..., ::-1], zeros], axis=-1).swapaxes(-1, -2)


def filters(taps: jax.Array) -> jax.Array:
    """h [..., w, S] of `reversed_taps`."""
    length = (taps.shape[-2] + 1) // 2
    return taps[..., length - 1 :: -1, :].swapaxes(-1, -2)


def lazy_output(inputs: jax.Array, taps: jax.Array, position: jax.Array, begin: jax.Array) -> jax.Array:
    """y [B, W] at `position` of inputs [B, S, W], that of `position` among them.

    Args:
      taps: [2 S - 1, w], see `reversed_taps`.
      begin: int32 [B] or []: earlier inputs do not count.
    """
    return _product(inputs, taps, position, jnp.zeros((), jnp.int32), begin)


def near_output(
    inputs: jax.Array,
    later: jax.Array,
    taps: jax.Array,
    position: jax.Array,
    start: jax.Array,
    begin: jax.Array,
) -> jax.Array:
    """y [B, W] at `position`: what `later` says, and the inputs since `start`, when the last tile ended.

    NaN if another tile should have ended since, so that a forgotten `absorb` cannot go unnoticed.

    Args:
      inputs, taps, begin: see `lazy_output`.
      later: [B, S, W].
    """
    length = inputs.shape[1]
    size = min(TILE, length)
    offset = jnp.minimum(start, length - size)
    near = jax.lax.dynamic_slice_in_dim(inputs, offset, size, axis=1)
    y = _product(near, taps, position, offset, jnp.maximum(start, begin))
    y = y + jax.lax.dynamic_index_in_dim(later, position, axis=1, keepdims=False)
    return jnp.where(position - start < TILE, y, jnp.nan)


def _product(
    inputs: jax.Array, taps: jax.Array, position: jax.Array, offset: jax.Array, begin: jax.Array
) -> jax.Array:
    """y [B, W] at `position` of inputs [B, n, W], the first of which is that of `offset`."""
    batch, size, width = inputs.shape
    last = (taps.shape[0] - 1) // 2
    weights = jax.lax.dynamic_slice_in_dim(taps, last - (position - offset), size)
    counts = offset + jnp.arange(size, dtype=jnp.int32) >= jnp.broadcast_to(begin, (batch,))[:, None]
    inputs = jnp.where(counts[..., None], inputs, 0).reshape(batch, size, -1, weights.shape[-1])
    return sum_products((inputs * weights[:, None]).reshape(batch, size, width), 1)


def tile_sizes(length: int) -> tuple[int, ...]:
    """The sizes U of the tiles of a sequence of `length` steps, ascending."""
    sizes = []
    while TILE << len(sizes) < length:
        sizes.append(TILE << len(sizes))
    return tuple(sizes)


def due_size(n_steps: int) -> int:
    """The size of the tile that ends after `n_steps`; 0 where none does."""
    return 0 if n_steps % TILE else n_steps & -n_steps


def tile_spectra(h: jax.Array) -> tuple[jax.Array, ...]:
    """For each of the `tile_sizes(S)` the spectrum [..., w, U + 1] of h_1 .. h_{2U-1}, of h [..., w, S]."""
    sizes = tile_sizes(h.shape[-1])
    return tuple(jnp.fft.rfft(h[..., 1 : 2 * size], n=2 * size) for size in sizes)


def open_tiles(inputs: jax.Array, h: jax.Array, position: jax.Array, window: Window) -> jax.Array:
    """What the inputs [B, S, W] before `position` add to later outputs, [B, S, W]: one FFT over all of them.

    Args:
      h: [w, S].
    """
    length = inputs.shape[1]
    seen = jnp.where(_before(length, position) & _from(length, window.begin), inputs, 0)
    later = _time_first(long_conv(_channels_first(seen, len(h)), h), inputs.shape)
    return jnp.where(_before(length, window.end), later, 0)


def absorb(
    inputs: jax.Array, later: jax.Array, spectrum: jax.Array, position: jax.Array, window: Window
) -> jax.Array:
    """`later` [B, S, W] with what the U inputs before `position` add.

    Args:
      inputs: [B, S, W].
      spectrum: [w, U + 1], see `tile_spectra`.
    """
    length, size = inputs.shape[1], spectrum.shape[-1] - 1
    tile = jax.lax.dynamic_slice_in_dim(inputs, position - size, size, axis=1)
    tile = jnp.where(_from(size, window.begin - (position - size)), tile, 0)
    product = jnp.fft.rfft(_channels_first(tile, len(spectrum)), n=2 * size) * spectrum
    added = jnp.fft.irfft(product, n=2 * size)[..., size - 1 : 2 * size - 1]
    added = _time_first(added.astype(later.dtype), tile.shape)
    added = jnp.where(_before(size, window.end - position), added, 0)
    # Near the end fewer than U outputs are left: what begins before `position` is moved out of the way.
    offset = jnp.minimum(position, length - size)
    added = jnp.where(_from(size, position - offset), jnp.roll(added, position - offset, axis=1), 0)
    before = jax.lax.dynamic_slice_in_dim(later, offset, size, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(later, before + added, offset, axis=1)


def _from(length: int, begin: jax.Array) -> jax.Array:
    """Mask [B or 1, length, 1] of the times from `begin` ([B] or []) on."""
    return jnp.arange(length, dtype=jnp.int32)[:, None] >= jnp.reshape(begin, (-1, 1, 1))


def _before(length: int, end: jax.Array) -> jax.Array:
    """Mask [B or 1, length, 1] of the times before `end` ([B] or [])."""
    return ~_from(length, end)


def _channels_first(x: jax.Array, n_filters: int) -> jax.Array:
    """[B, T, W] as [B, G, w, T]."""
    return x.swapaxes(1, 2).reshape(len(x), -1, n_filters, x.shape[1])


def _time_first(x: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
    """[B, G, w, T] as [B, T, W]."""
    batch, length, width = shape
    return x.reshape(batch, width, length).swapaxes(1, 2)
