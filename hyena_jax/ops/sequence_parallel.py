"""Sequence parallelism: the operators on a sequence of which each device holds one part.

Axes: B batch, L length, l = L / n the part of it on one of n devices, T queries, C channels, D channels of a
recurrence, H heads, G heads of keys and values, d head_dim, K taps. The parts follow one another in the order
of the devices along the mesh axis `axis_name`.

Each function runs inside `shard_map` (`sequence_shards.over_shards` calls it there): it reads and returns the
local part, and talks to the other devices by collectives over `axis_name`. What goes between devices:

    long_conv           everything, twice: length for channels by all-to-all, and back
    linear_recurrence   the product of the factors and the last state, [B, D] each
    short_conv          the last K - 1 inputs
    local_attention     the last `window` keys and values
    attention           all keys and values
    fastmax             sums of features over keys
    aft_simple          running sums of the last key

Arrays that are alike on all devices (taps, for instance) must have been cast to vary over `axis_name`: the
sum of their gradients over the devices is the gradient of that cast.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from hyena_jax.ops import aft, attention, fastmax, short_conv
from hyena_jax.ops.derivatives import linear_solve
from hyena_jax.ops.linear_recurrence import Recurrence, default_method


def on_whole_length(f: Callable[[jax.Array], jax.Array], u: jax.Array, axis_name: str) -> jax.Array:
    """f [G, C/n, B, L] -> [G, C/n, B, L], applied to u [G, C, B, l]: channels are shared out in place of L.

    Two all-to-all collectives; device i gets channels i C/n .. (i+1) C/n - 1 of each of the G groups.
    """
    whole = jax.lax.all_to_all(u, axis_name, split_axis=1, concat_axis=3, tiled=True)
    return jax.lax.all_to_all(f(whole), axis_name, split_axis=3, concat_axis=1, tiled=True)


def before(x: jax.Array, n: int, axis: int, axis_name: str) -> jax.Array:
    """The n entries along `axis` that precede this device's x, oldest first: zeros where the sequence starts.

    From as many devices as it takes, one step of the ring each.
    """
    length, n_devices = x.shape[axis], jax.lax.axis_size(axis_name)
    parts = []
    for hop in range(1, -(-n // length) + 1):
        # A device that nobody sends to receives zeros.
        ring = [(i, i + hop) for i in range(n_devices - hop)]
        size = min(length, n - (hop - 1) * length)
        last = jax.lax.slice_in_dim(x, length - size, length, axis=axis)
        parts.insert(0, jax.lax.ppermute(last, axis_name, ring))
    return jnp.concatenate(parts, axis) if parts else jax.lax.slice_in_dim(x, 0, 0, axis=axis)


def short_convolution(
    x: jax.Array,
    taps: jax.Array,
    bias: jax.Array,
    segment_ids: jax.Array | None,
    axis: int,
    axis_name: str,
) -> jax.Array:
    """`ops.short_conv.short_conv` of the whole sequence: x and, at axes counted alike, segment_ids are local.

    Args:
      taps: [K, ...], each broadcast against x.
      bias: broadcast against x.
      segment_ids: integers broadcast against x, or None.
      axis: which axis of x is time, counted from the last: negative.
    """
    n = len(taps) - 1
    seen = jnp.concatenate([before(x, n, axis, axis_name), x], axis)
    if segment_ids is not None:
        segment_ids = jnp.concatenate([before(segment_ids, n, axis, axis_name), segment_ids], axis)
    y = short_conv.short_conv(seen, taps, bias, axis, None, segment_ids)
    return jax.lax.slice_in_dim(y, n, y.shape[axis], axis=axis)


def linear_recurrence(axis_name: str) -> Recurrence:
    """A form of `ops.linear_recurrence`: a, x and h are local, h0 is the state before the whole sequence.

    Each device runs its part from 0, the products of factors and the last states of all parts give the state
    before each, and the device runs its part again from there. h0 counts on the first device alone (the last
    one, in reverse); the state returned is that after the local part.
    """

    def form(a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool) -> tuple[jax.Array, jax.Array]:
        h = _recurrence(a, x, h0, reverse, axis_name)
        return h, h[:, 0 if reverse else -1].astype(h0.dtype)

    return form


def _recurrence(a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool, axis_name: str) -> jax.Array:
    """h, as the solution of a linear equation: see `ops.linear_recurrence`."""
    n_devices = jax.lax.axis_size(axis_name)
    first, final = (-1, 0) if reverse else (0, -1)
    is_start = jax.lax.axis_index(axis_name) == (n_devices - 1 if reverse else 0)
    onward = [(i + 1, i) if reverse else (i, i + 1) for i in range(n_devices - 1)]
    backward = [(j, i) for i, j in onward]

    def joined(edge: jax.Array, rest: jax.Array, edge_first: bool) -> jax.Array:
        return jnp.concatenate([edge, rest] if edge_first else [rest, edge], axis=1)

    def matvec(a: jax.Array, unknowns: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, h = unknowns
        wide = h.astype(start.dtype)
        edge = jax.lax.ppermute(wide[:, final], axis_name, onward) + jnp.where(is_start, start, 0)
        before = joined(edge[:, None], wide[:, 1:] if reverse else wide[:, :-1], not reverse)
        return start, (wide - a.astype(start.dtype) * before).astype(h.dtype)

    def solve(known: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, x = known
        return start, _run(a, x, start, reverse, axis_name)

    def transpose_solve(known: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start_bar, h_bar = known
        # The factor of the first step on the next device; what it multiplies at the very end is 0.
        edge = jax.lax.ppermute(a[:, first, None], axis_name, backward)
        later = joined(edge, a[:, :-1] if reverse else a[:, 1:], reverse)
        g = _run(later, h_bar, jnp.zeros_like(start_bar), not reverse, axis_name)
        product = a[:, first].astype(start_bar.dtype) * g[:, first].astype(start_bar.dtype)
        return start_bar + jnp.where(is_start, product, 0), g

    return linear_solve(matvec, solve, transpose_solve, a, (h0, x))[1]


def _run(a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool, axis_name: str) -> jax.Array:
    """h, each device's part computed twice: from 0, and from the state before it."""
    run = default_method()
    last = run(a, x, jnp.zeros_like(h0), reverse)[1]
    start = _state_before(a.astype(h0.dtype).prod(axis=1), last, h0, reverse, axis_name)
    return run(a, x, start, reverse)[0]


def _state_before(
    factor: jax.Array, last: jax.Array, h0: jax.Array, reverse: bool, axis_name: str
) -> jax.Array:
    """State [B, D] before this device's part, given each part's h -> factor h + last."""
    parts = jax.lax.all_gather((factor, last), axis_name)

    def advance(h: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return part[0] * h + part[1], h

    starts = jax.lax.scan(advance, h0, parts, reverse=reverse)[1]
    return jax.lax.dynamic_index_in_dim(starts, jax.lax.axis_index(axis_name), keepdims=False)


def local_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, window: int, axis_name: str
) -> jax.Array:
    """`ops.attention.local_attention` of q [B, l, H, d] and keys and values [B, l, G, d] of all devices.

    Args:
      segment_ids: integers [B, l], or None; other documents must have other ids.
    """
    length = q.shape[1]
    n = min(window, length * (jax.lax.axis_size(axis_name) - 1))
    k, v = (jnp.concatenate([before(z, n, 1, axis_name), z], axis=1) for z in (k, v))
    positions = jax.lax.axis_index(axis_name) * length - n + jnp.arange(n + length, dtype=jnp.int32)
    if segment_ids is not None:
        segment_ids = jnp.concatenate([before(segment_ids, n, 1, axis_name), segment_ids], axis=1)
    return attention.local_attention(q, k, v, window, positions[None] >= 0, segment_ids)


def softmax_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, is_causal: bool, axis_name: str
) -> jax.Array:
    """`ops.attention.softmax_attention` of q [B, l, H, d] over all keys and values, [B, l, G, d] here.

    Every device holds all keys and values.
    """
    length = q.shape[1]
    k, v = (jax.lax.all_gather(z, axis_name, axis=1, tiled=True) for z in (k, v))
    start = jax.lax.axis_index(axis_name) * length
    ids = None
    if segment_ids is not None:
        ids = (segment_ids, jax.lax.all_gather(segment_ids, axis_name, axis=1, tiled=True))
    return attention.softmax_attention(q, k, v, is_causal, start, segment_ids=ids)


def fastmax_causal(q: jax.Array, k: jax.Array, v: jax.Array, p: int, axis_name: str) -> jax.Array:
    """`ops.fastmax.fastmax_causal` of q, k, v [B, l, H, d]: the sums of earlier parts are added up first."""
    sums = jax.lax.all_gather(fastmax.key_sums(k, v, p), axis_name)
    is_earlier = jnp.arange(len(sums), dtype=jnp.int32) < jax.lax.axis_index(axis_name)
    earlier = jnp.where(is_earlier.reshape(-1, 1, 1, 1, 1), sums, 0).sum(axis=0)
    return fastmax.fastmax_causal(q, k, v, p, earlier)[0]


def fastmax_bidirectional(q: jax.Array, k: jax.Array, v: jax.Array, p: int, axis_name: str) -> jax.Array:
    """`ops.fastmax.fastmax_bidirectional` of q, k, v [B, l, H, d]."""
    return fastmax.attend_to_sums(q, jax.lax.psum(fastmax.key_sums(k, v, p), axis_name), p)


def aft_simple(keys: jax.Array, values: jax.Array, documents: jax.Array, axis_name: str) -> aft.Sums:
    """`ops.aft.running_sums` over the whole sequence: keys and values [B, l, ...], documents [B or 1, l].

    Each part sums from nothing; then what came before it is merged in, as far as its document goes on.
    """
    sums = aft.running_sums(keys, values, aft.no_sums(keys, values), documents)
    here = aft.Run(documents[..., None, None], sums)
    last = jax.tree.map(lambda x: x[:, -1:], here)
    parts = jax.lax.all_gather(last, axis_name)
    nothing = aft.Run(last.document, aft.no_sums(keys, values))

    def advance(run: aft.Run, part: aft.Run) -> tuple[aft.Run, aft.Run]:
        return aft.join(run, part), run

    starts = jax.lax.scan(advance, nothing, parts)[1]
    index = jax.lax.axis_index(axis_name)
    start = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), starts)
    return aft.join(start, here).sums
