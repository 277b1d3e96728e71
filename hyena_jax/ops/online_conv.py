"""Long convolutions decoded exactly with any filter: y_t = sum_{s=0..t} h_s u_{t-s}, from all inputs so far.

Axes: B batch, T new tokens, S the capacity of a history in tokens, w channels of a filter, W = G w (channel
g w + c has channel c of the filter), U inputs of a tile. Time comes before the channels in a
history, [B, S, W]: a step then reads and writes whole rows.

`prefill` takes T inputs at once, by one FFT over the whole history. `step` takes one input, in one of two
ways:

- by one product with the whole history, O(S) per step, at any time;
- with tiles, O(log(S)^2) per step on average (relaxed multiplication: van der Hoeven 2002, Relax, but don't
  be too lazy; Oncescu et al. 2024, arXiv 2410.12982). `open_tiles` computes `later` [B, S, W], the
  contribution of the inputs so far to later outputs. A step adds the contribution of the inputs since the
  last tile. After every `TILE` steps, `absorb` adds the contribution of the last U inputs to the next U
  outputs, by one FFT of 2 U points, where U = `due_size(n)` and n counts the steps since the opening. The
  caller counts n, so every size is static: nothing branches, and no buffer is copied.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.ops.fast.derivatives import sum_products
from hyena_jax.ops.long_conv import blockwise_conv, fft_conv, long_conv

# Steps from one tile to the next, a power of two. A step sums at most as many inputs directly.
TILE = 64


class Tiling(NamedTuple):
    """Spectra [w, U + 1] for each size U; positions [] of the opening and of the end of the last tile."""

    spectra: tuple[jax.Array, ...]
    opened: jax.Array
    last_end: jax.Array


class FilterTaps(NamedTuple):
    """A filter as `reversed_taps` [2 S - 1, w]; `tiling` is None while no tiles are open.

    `block_len` [] is the steps of a block that is convolved by itself; None: the sequence is one block.
    """

    taps: jax.Array
    block_len: jax.Array | None
    tiling: Tiling | None


class History(NamedTuple):
    """A filter, and its inputs [B, S, W] up to `position` []; `later` is [B, S, W] while tiles are open.

    The tokens (and blocks) of a row begin at `first` [B].
    """

    filter: FilterTaps
    position: jax.Array
    first: jax.Array
    inputs: jax.Array
    later: jax.Array | None


class BlockBounds(NamedTuple):
    """The inputs of a block start at `begin`, and its outputs stop before `end`: int32 [B] or []."""

    begin: jax.Array
    end: jax.Array


def filter_taps(h: jax.Array, skip: jax.Array | None, block_len: int | None) -> FilterTaps:
    """The filter h [w, S], with the skip [w] in lag 0."""
    if skip is not None:
        h = h.at[..., 0].add(skip)
    block = None if block_len is None else jnp.asarray(block_len, jnp.int32)
    return FilterTaps(reversed_taps(h), block, None)


def no_inputs(filter: FilterTaps, batch_size: int, width: int) -> jax.Array:
    """The inputs [B, S, W] before the first token."""
    capacity = (len(filter.taps) + 1) // 2
    return jnp.zeros((batch_size, capacity, width), filter.taps.dtype)


def reversed_taps(h: jax.Array) -> jax.Array:
    """The taps [..., 2 S - 1, w] of h [..., w, S] in the order of the inputs: h_{S-1} .. h_0, then zeros.

    From row S - 1 - t on, they are the weights of inputs 0, 1, .. in output t.
    """
    zeros = jnp.zeros((*h.shape[:-1], h.shape[-1] - 1), h.dtype)
    return jnp.concatenate([h[..., ::-1], zeros], axis=-1).swapaxes(-1, -2)


def forward_taps(taps: jax.Array) -> jax.Array:
    """h [..., w, S] of the taps [..., 2 S - 1, w] that `reversed_taps` gives."""
    length = (taps.shape[-2] + 1) // 2
    return taps[..., length - 1 :: -1, :].swapaxes(-1, -2)


def prefill(history: History, u: jax.Array, block_len: int | None) -> tuple[jax.Array, jax.Array]:
    """y [W, B, T] of the next tokens u [W, B, T], and the inputs after them; block_len is static."""
    position, first = history.position, history.first
    inputs, h = _write(history.inputs, u, position), forward_taps(history.filter.taps)
    # Blocks count from a row's first token.
    aligned = inputs if block_len is None else _roll_rows(inputs, -first)
    channels_first = aligned.transpose(2, 0, 1)
    groups = channels_first.reshape(-1, len(h), *channels_first.shape[1:])
    y = blockwise_conv(groups, h, None, block_len, method=fft_conv).reshape(channels_first.shape)
    y = y if block_len is None else _roll_rows(y.transpose(1, 2, 0), first).transpose(2, 0, 1)
    return jax.lax.dynamic_slice_in_dim(y, position, u.shape[-1], axis=-1).astype(u.dtype), inputs


def step(history: History, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """y [W, B, 1] of the next u [W, B, 1], and the inputs after it; NaN if an `absorb` was skipped."""
    position, taps = history.position, history.filter.taps
    begin = _block_bounds(history).begin
    inputs = _write(history.inputs, u, position)
    if history.later is None:
        y = _product(inputs, taps, position, jnp.zeros((), jnp.int32), begin)
    else:
        # What a tile left for this position, and the inputs since the last tile; NaN if a tile is overdue.
        last_end, length = history.filter.tiling.last_end, inputs.shape[1]
        offset = jnp.minimum(last_end, length - min(TILE, length))
        near = jax.lax.dynamic_slice_in_dim(inputs, offset, min(TILE, length), axis=1)
        y = _product(near, taps, position, offset, jnp.maximum(last_end, begin))
        y = y + jax.lax.dynamic_index_in_dim(history.later, position, axis=1, keepdims=False)
        y = jnp.where(position - last_end < TILE, y, jnp.nan)
    return y.T[..., None].astype(u.dtype), inputs


def _product(
    inputs: jax.Array, taps: jax.Array, position: jax.Array, offset: jax.Array, begin: jax.Array
) -> jax.Array:
    """y [B, W] at `position`, from the inputs [B, n, W] at positions `offset` .. `offset` + n - 1.

    Inputs before `begin` count as 0; taps [2 S - 1, w] are `reversed_taps`.
    """
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
    """The size of the tile that is due after `n_steps` steps; 0 where none is."""
    return 0 if n_steps % TILE else n_steps & -n_steps


def open_tiles(history: History) -> History:
    """The history whose steps use tiles: `absorb` must follow every `TILE` steps. One FFT over all inputs."""
    position, inputs = history.position, history.inputs
    h, length = forward_taps(history.filter.taps), inputs.shape[1]
    bounds = _block_bounds(history)
    seen = jnp.where(_before(length, position) & _from(length, bounds.begin), inputs, 0)
    later = _time_first(long_conv(_channels_first(seen, len(h)), h, method=fft_conv), inputs.shape)
    later = jnp.where(_before(length, bounds.end), later, 0)
    # A tile of U inputs meets h_1 .. h_{2U-1}.
    spectra = tuple(jnp.fft.rfft(h[..., 1 : 2 * size], n=2 * size) for size in tile_sizes(length))
    tiling = Tiling(spectra, position, position)
    return history._replace(filter=history.filter._replace(tiling=tiling), later=later)


def close_tiles(history: History) -> History:
    """The history whose steps need no `absorb`, and which a prefill can continue."""
    return history._replace(filter=history.filter._replace(tiling=None), later=None)


def absorb(history: History, size: int) -> History:
    """The history after a tile: `size` must be `due_size` of the number of steps since the opening.

    At any other step, or with another size, the next outputs are NaN.
    """
    position = history.position
    spectra, opened, last_end = history.filter.tiling
    n_steps = position - opened
    is_due = (n_steps & -n_steps == size) & (position - last_end == TILE)
    # An end so long ago counts as overdue in the next step, which gives NaN.
    tiling = Tiling(spectra, opened, jnp.where(is_due, position, -TILE))
    spectrum = spectra[(size // TILE).bit_length() - 1]
    later = _add_tile(history.inputs, history.later, spectrum, position, _block_bounds(history))
    return history._replace(filter=history.filter._replace(tiling=tiling), later=later)


def _add_tile(
    inputs: jax.Array, later: jax.Array, spectrum: jax.Array, position: jax.Array, bounds: BlockBounds
) -> jax.Array:
    """`later` [B, S, W] plus the contribution of the U inputs before `position`; spectrum [w, U + 1]."""
    length, size = inputs.shape[1], spectrum.shape[-1] - 1
    tile = jax.lax.dynamic_slice_in_dim(inputs, position - size, size, axis=1)
    tile = jnp.where(_from(size, bounds.begin - (position - size)), tile, 0)
    product = jnp.fft.rfft(_channels_first(tile, len(spectrum)), n=2 * size) * spectrum
    added = jnp.fft.irfft(product, n=2 * size)[..., size - 1 : 2 * size - 1]
    added = _time_first(added.astype(later.dtype), tile.shape)
    added = jnp.where(_before(size, bounds.end - position), added, 0)
    # Near the end fewer than U outputs are left: the slice starts before `position`, where nothing is added.
    offset = jnp.minimum(position, length - size)
    added = jnp.where(_from(size, position - offset), jnp.roll(added, position - offset, axis=1), 0)
    before = jax.lax.dynamic_slice_in_dim(later, offset, size, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(later, before + added, offset, axis=1)


def _block_bounds(history: History) -> BlockBounds:
    block_len, position = history.filter.block_len, history.position
    if block_len is None:
        return BlockBounds(jnp.zeros((), jnp.int32), jnp.asarray(jnp.iinfo(jnp.int32).max))
    begin = position - (position - history.first) % block_len
    return BlockBounds(begin, begin + block_len)


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


def _roll_rows(x: jax.Array, shifts: jax.Array) -> jax.Array:
    """x [B, S, W] with row b rotated by shifts[b] steps towards the end."""
    return jax.vmap(lambda row, shift: jnp.roll(row, shift, axis=0))(x, shifts)


def _write(inputs: jax.Array, u: jax.Array, position: jax.Array) -> jax.Array:
    """inputs [B, S, W] with u [W, B, T] at `position` .. `position` + T - 1."""
    u = u.transpose(1, 2, 0).astype(inputs.dtype)
    return jax.lax.dynamic_update_slice_in_dim(inputs, u, position, axis=1)
