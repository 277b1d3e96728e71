"""What mixers with long filters have in common: the state, and how their convolutions run on from it.

Axes: B batch, L length, T new tokens, S longest length of a state, F filters, G groups of channels that
share filters, w channels of a group, W = G w, n modes.

Such a mixer is a function

    mix(x [B, T, D], short_history, real, convolve, deterministic) -> y, short_history, long_memory

around its long convolutions, which it leaves to `convolve`. The functions here call it with the
`convolve` that the parallel form, a prefill or a single step needs. Inside, channels come first, [W, B, T]
(`hyena_jax.ops.dense` says why); of a state, the batch does, as of every mixer's.

What a convolution remembers depends on its filter. One that is the response of a small recurrence (`modal`,
`s4d`) is run as that, in constant time and memory: `modal_memory`. Any other needs all inputs: `history`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hyena_jax.config import require
from hyena_jax.filters.state_space import Modes, modes_of
from hyena_jax.mixers import history, modal_memory
from hyena_jax.mixers.history import Taps
from hyena_jax.mixers.inputs import is_real
from hyena_jax.ops.long_conv import blockwise_conv
from hyena_jax.ops.sequence_parallel import on_whole_length
from hyena_jax.ops.sequence_shards import over_shards, share_out
from hyena_jax.ops.short_conv import empty_history

# What `jax.checkpoint` knows the filters of a parallel form by.
FILTER = "filter"


class Shared(NamedTuple):
    """What the batch has in common: the filters with the skips in lag 0, tokens seen []."""

    filters: Taps | Modes
    position: jax.Array


class LongState(NamedTuple):
    """The first real position of each row [B], inputs of the short FIR [B, C, K-1], and memories.

    For each filter what its convolution remembers: with `Taps` its inputs [B, S, W], float32; with `Modes`
    the modes' states [B, W, n], complex64. `later` [B, S, W] is None unless tiles are open: `open_tiles`.
    """

    shared: Shared
    first: jax.Array
    short_history: jax.Array
    long_memory: tuple[jax.Array, ...]
    later: tuple[jax.Array, ...] | None


Tree = Any
# One long convolution: (u [W, B, T], filter index) -> (y [W, B, T], its memory after u, or None).
Convolve = Callable[[jax.Array, int], tuple[jax.Array, jax.Array | None]]
# See the module's docstring; in the parallel form there is no history, and each memory is None.
Mix = Callable[..., tuple[jax.Array, jax.Array | None, tuple[jax.Array | None, ...]]]


def parallel(
    h: jax.Array,
    skip: jax.Array | None,
    block_len: int | None = None,
    future: jax.Array | None = None,
    sequence_axis: str | None = None,
) -> Convolve:
    """Convolution of a whole sequence with h [F, w, L] and skips [F, w], in blocks of `block_len` alone.

    With `future` [F, w, L] also of the sequence turned round, so that lag 0 counts in both. With
    `sequence_axis` on the devices along it, each of which has the whole length for w / n channels of a group.
    """

    h = checkpoint_name(h, FILTER)

    def convolve(u: jax.Array, o: int) -> tuple[jax.Array, None]:
        own, ahead = (None if x is None else x[o] for x in (skip, future))
        if sequence_axis is None:
            return blockwise_conv(u, h[o], own, block_len, ahead), None
        return _over_devices(u, h[o], own, ahead, block_len, sequence_axis), None

    return convolve


def _over_devices(
    u: jax.Array,
    h: jax.Array,
    skip: jax.Array | None,
    future: jax.Array | None,
    block_len: int | None,
    sequence_axis: str,
) -> jax.Array:
    """`blockwise_conv` of u [W, B, L] whose length the devices along `sequence_axis` share."""

    def local(u: jax.Array, h: jax.Array, skip: jax.Array | None, future: jax.Array | None) -> jax.Array:
        def convolve(u: jax.Array) -> jax.Array:
            rows = u.reshape(-1, *u.shape[2:])
            return blockwise_conv(rows, h, skip, block_len, future).reshape(u.shape)

        return on_whole_length(convolve, u, sequence_axis)

    # The network of a filter works on one part of the lags on each device; then channels replace lags.
    h, future = (x if x is None else share_out(x, sequence_axis, -1) for x in (h, future))
    on_devices = over_shards(local, sequence_axis, ("GWBL", "CT", "C", "CT"), "GWBL")
    return on_devices(u.reshape(-1, len(h), *u.shape[1:]), h, skip, future).reshape(u.shape)


def init_state(
    filter_module: nn.Module,
    skip: jax.Array | None,
    shape: tuple[int, int, int],
    short: tuple[int, int],
    block_len: int | None = None,
) -> LongState:
    """The state before the first token.

    Args:
      filter_module: of `hyena_jax.filters`, bound; it has F filters of w channels.
      skip: [F, w], added to lag 0.
      shape: batch size B, longest length S, width W.
      short: channels C and taps K of the short FIR; (0, 1) where there is none.
      block_len: steps of a block that is convolved alone; None where the sequence is one block.
    """
    batch_size, length, width = shape
    modes = modes_of(filter_module) if block_len is None else None
    if modes is None:
        h = filter_module(length)
        filters, memory, dtype = *history.empty(h, skip, batch_size, width, block_len), h.dtype
    else:
        filters, memory = modal_memory.empty(modes, skip, batch_size, width)
        dtype = filters.lag_zero.dtype
    return LongState(
        shared=Shared(filters, jnp.zeros((), jnp.int32)),
        first=jnp.zeros(batch_size, jnp.int32),
        short_history=empty_history(batch_size, *short, dtype),
        long_memory=memory,
        later=None,
    )


def prefill(
    mix: Mix, state: LongState, x: jax.Array, lengths: jax.Array | None, block_len: int | None = None
) -> tuple[LongState, jax.Array]:
    """The next T tokens x [B, T, D] at once; block_len as in `init_state`.

    Raises:
      ValueError: if there are more tokens than the state has room for.
    """
    n_tokens = x.shape[1]
    state = close_tiles(state)
    filters, position = state.shared
    first = state.first if lengths is None else n_tokens - lengths
    if isinstance(filters, Modes):
        convolve = modal_memory.prefill(filters, state.long_memory)
    else:
        room = state.long_memory[0].shape[1]
        require(n_tokens <= room, "sequence length", n_tokens, f"in 1..max_len={room}")
        convolve = history.prefill(filters, state.long_memory, position, first, block_len)
    state, y = _mix_on(mix, state, x, is_real(lengths, n_tokens), convolve)
    return state._replace(first=first), y


def step(mix: Mix, state: LongState, x: jax.Array) -> tuple[LongState, jax.Array]:
    """The next token x [B, D]: O(n) with modes, O(S) with the history, or less with tiles."""
    filters, position = state.shared
    if isinstance(filters, Modes):
        convolve = modal_memory.step(filters, state.long_memory)
    else:
        convolve = history.step(filters, state.long_memory, state.later, position, state.first)
    state, y = _mix_on(mix, state, x[:, None], None, convolve)
    return state, y[:, 0]


def _mix_on(
    mix: Mix, state: LongState, x: jax.Array, real: jax.Array | None, convolve: Convolve
) -> tuple[LongState, jax.Array]:
    """`mix` of the next tokens x [B, T, D]."""
    y, short_history, memory = mix(x, state.short_history.swapaxes(0, 1), real, convolve, True)
    state = state._replace(
        shared=state.shared._replace(position=state.shared.position + x.shape[1]),
        short_history=short_history.swapaxes(0, 1),
        long_memory=memory,
    )
    return state, y


def open_tiles(state: Tree) -> Tree:
    """A mixer's or a model's state, ready for fast steps of long filters.

    Steps of a state without tiles are exact at any time. With tiles, `absorb` must follow every
    `ops.online_conv.TILE` steps; states without a history stay as they are.
    """

    def opened(state: LongState) -> LongState:
        filters, position = state.shared
        return _with(state, *history.open_tiles(filters, state.long_memory, position, state.first))

    return _map_histories(opened, state)


def absorb(state: Tree, size: int) -> Tree:
    """The state after a tile of `size` steps: `ops.online_conv.due_size` of the steps since the opening.

    At any other moment, or with another size, the next outputs are NaN.
    """

    def absorbed(state: LongState) -> LongState:
        filters, position = state.shared
        memories = state.long_memory, state.later
        return _with(state, *history.absorb(filters, *memories, position, state.first, size))

    return _map_histories(absorbed, state)


def close_tiles(state: Tree) -> Tree:
    """The state whose steps need no tiles."""

    def closed(state: LongState) -> LongState:
        return _with(state, state.shared.filters._replace(tiles=None), None)

    return _map_histories(closed, state)


def has_tiles(state: Tree) -> bool:
    """Whether tiles are open in a mixer's or a model's state."""
    nodes = jax.tree.leaves(state, is_leaf=_is_history)
    return any(_is_history(node) and node.later is not None for node in nodes)


def _map_histories(function: Callable[[LongState], LongState], state: Tree) -> Tree:
    nodes, structure = jax.tree.flatten(state, is_leaf=_is_history)
    return structure.unflatten([function(node) if _is_history(node) else node for node in nodes])


def _is_history(node: Any) -> bool:
    return isinstance(node, LongState) and isinstance(node.shared.filters, Taps)


def _with(state: LongState, filters: Taps, later: tuple[jax.Array, ...] | None) -> LongState:
    return state._replace(shared=state.shared._replace(filters=filters), later=later)
