"""Sequence parallelism: operators on a sequence whose length is sharded over the devices of a mesh axis.

Axes: B batch, L length, l = L / n the shard of L on one of n devices, T queries, C channels, D channels of a
recurrence, H heads, G heads of keys and values, d head_dim, K taps; for the delta rule see `ops.delta_rule`.

Each function reads and returns the local shard; the shards follow one another in the order of the devices
along the mesh axis `axis_name`. It runs inside `shard_map` and communicates by collectives over `axis_name`.
With `axis_name=None` the shard is the whole sequence (l = L), and the function is the plain operator.
`sequence_shards.sharded` calls it either way. The devices communicate:

    long_conv           all inputs and outputs: an all-to-all from shards of L to shards of C, and one back
    linear_recurrence   the product of the factors and the last state, [B, D] each
    short_conv          the last K - 1 inputs
    few_taps            the last K - 1 inputs
    local_attention     the last `window` keys and values
    attention           all keys and values
    fastmax             sums of features over keys
    delta_rule          what a shard makes of a memory: a matrix and a memory, [B, G, K, K] and [B, G, K, V]
    aft_simple          running sums at the last key

Arrays that all devices share (taps, for instance) must have been cast to vary over `axis_name`: the gradient
of that cast sums the gradients over the devices.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from hyena_jax.ops import aft, attention, delta_rule, fastmax, few_taps, short_conv
from hyena_jax.ops.attention import Attention
from hyena_jax.ops.derivatives import linear_solve
from hyena_jax.ops.linear_recurrence import Recurrence, default_method
from hyena_jax.ops.long_conv import Convolution


def on_whole_length(f: Callable[[jax.Array], jax.Array], u: jax.Array, axis_name: str | None) -> jax.Array:
    """f [G, C/n, B, L] -> [G, C/n, B, L] applied to u [G, C, B, l]: f sees channels sharded instead of L.

    Two all-to-all collectives; device i gets channels i C/n .. (i+1) C/n - 1 of each of the G groups.
    """
    if axis_name is None:
        return f(u)
    whole = jax.lax.all_to_all(u, axis_name, split_axis=1, concat_axis=3, tiled=True)
    return jax.lax.all_to_all(f(whole), axis_name, split_axis=3, concat_axis=1, tiled=True)


def before(x: jax.Array, n: int, axis: int, axis_name: str) -> jax.Array:
    """The n entries along `axis` before this device's x, oldest first; zeros before the sequence starts.

    The entries come from as many earlier devices as needed, by one `ppermute` each.
    """
    length, n_devices = x.shape[axis], jax.lax.axis_size(axis_name)
    parts = []
    for hop in range(1, -(-n // length) + 1):
        # A device without a sender receives zeros.
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
    axis_name: str | None,
) -> jax.Array:
    """`ops.short_conv.short_conv` from the start of the sequence; x and segment_ids are local.

    Args:
      taps: [K, ...], each broadcast against x.
      bias: broadcast against x.
      segment_ids: integers broadcast against x, or None.
      axis: which axis of x and segment_ids is time; negative, since segment_ids may have fewer axes.
    """
    if axis_name is None:
        return short_conv.short_conv(x, taps, bias, axis, None, segment_ids)
    n = len(taps) - 1
    seen = jnp.concatenate([before(x, n, axis, axis_name), x], axis)
    if segment_ids is not None:
        segment_ids = jnp.concatenate([before(segment_ids, n, axis, axis_name), segment_ids], axis)
    y = short_conv.short_conv(seen, taps, bias, axis, None, segment_ids)
    return jax.lax.slice_in_dim(y, n, y.shape[axis], axis=axis)


def few_taps_conv(
    u: jax.Array,
    h: jax.Array,
    skip: jax.Array | None,
    segment_ids: jax.Array | None,
    axis_name: str | None,
    method: Convolution | None = None,
) -> jax.Array:
    """`ops.few_taps.few_taps_conv` of u [G, w, B, l] from the start of the sequence; segment_ids [B, l]."""
    if axis_name is None:
        return few_taps.few_taps_conv(u, h, skip, segment_ids, method)
    n = h.shape[1] - 1
    seen = jnp.concatenate([before(u, n, 3, axis_name), u], axis=3)
    if segment_ids is not None:
        segment_ids = jnp.concatenate([before(segment_ids, n, 1, axis_name), segment_ids], axis=1)
    return few_taps.few_taps_conv(seen, h, skip, segment_ids, method)[..., n:]


def linear_recurrence(axis_name: str | None, run: Recurrence | None = None) -> Recurrence:
    """A form of `ops.linear_recurrence`: a, x and h are local, h0 is the state before the whole sequence.

    Each device runs its shard from 0. The products of factors and the last states of all shards give the
    state before each shard, from which each device reruns its shard. h0 counts on the first device alone (in
    reverse, on the last). The returned state is the one after the local shard.

    Args:
      run: the form that runs a shard; None is `default_method()`.
    """
    run = run or default_method()
    if axis_name is None:
        return run

    def form(a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool) -> tuple[jax.Array, jax.Array]:
        h = _recurrence(a, x, h0, reverse, axis_name, run)
        return h, h[:, 0 if reverse else -1].astype(h0.dtype)

    return form


def _recurrence(
    a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool, axis_name: str, run: Recurrence
) -> jax.Array:
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
        return start, _run(a, x, start, reverse, axis_name, run)

    def transpose_solve(known: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start_bar, h_bar = known
        # The factor of the first step on the next device; at the very end it multiplies 0.
        edge = jax.lax.ppermute(a[:, first, None], axis_name, backward)
        later = joined(edge, a[:, :-1] if reverse else a[:, 1:], reverse)
        g = _run(later, h_bar, jnp.zeros_like(start_bar), not reverse, axis_name, run)
        product = a[:, first].astype(start_bar.dtype) * g[:, first].astype(start_bar.dtype)
        return start_bar + jnp.where(is_start, product, 0), g

    return linear_solve(matvec, solve, transpose_solve, a, (h0, x))[1]


def _run(
    a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool, axis_name: str, run: Recurrence
) -> jax.Array:
    """h; each device computes its shard twice: from 0, and from the state before the shard."""
    last = run(a, x, jnp.zeros_like(h0), reverse)[1]
    start = _state_before(a.astype(h0.dtype).prod(axis=1), last, h0, reverse, axis_name)
    return run(a, x, start, reverse)[0]


def _state_before(
    factor: jax.Array, last: jax.Array, h0: jax.Array, reverse: bool, axis_name: str
) -> jax.Array:
    """State [B, D] before this device's shard; each shard maps the state h before it to factor h + last."""
    parts = jax.lax.all_gather((factor, last), axis_name)

    def advance(h: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return part[0] * h + part[1], h

    starts = jax.lax.scan(advance, h0, parts, reverse=reverse)[1]
    return jax.lax.dynamic_index_in_dim(starts, jax.lax.axis_index(axis_name), keepdims=False)


def local_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    window: int,
    axis_name: str | None,
    method: Attention | None = None,
) -> jax.Array:
    """`ops.attention.local_attention` of q [B, l, H, d], k and v [B, l, G, d].

    Args:
      segment_ids: integers [B, l], different for different documents, or None.
    """
    if axis_name is None:
        return attention.local_attention(q, k, v, window, None, segment_ids, method)
    length = q.shape[1]
    n = min(window, length * (jax.lax.axis_size(axis_name) - 1))
    k, v = (jnp.concatenate([before(z, n, 1, axis_name), z], axis=1) for z in (k, v))
    positions = jax.lax.axis_index(axis_name) * length - n + jnp.arange(n + length, dtype=jnp.int32)
    if segment_ids is not None:
        segment_ids = jnp.concatenate([before(segment_ids, n, 1, axis_name), segment_ids], axis=1)
    return attention.local_attention(q, k, v, window, positions[None] >= 0, segment_ids, method)


def softmax_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    is_causal: bool,
    axis_name: str | None,
    method: Attention | None = None,
) -> jax.Array:
    """`ops.attention.softmax_attention` of q [B, l, H, d] to the k and v [B, l, G, d] of all devices.

    Every device then holds all keys and values.
    """
    if axis_name is None:
        ids = None if segment_ids is None else (segment_ids, segment_ids)
        return attention.softmax_attention(q, k, v, is_causal, segment_ids=ids, method=method)
    length = q.shape[1]
    k, v = (jax.lax.all_gather(z, axis_name, axis=1, tiled=True) for z in (k, v))
    start = jax.lax.axis_index(axis_name) * length
    ids = None
    if segment_ids is not None:
        ids = (segment_ids, jax.lax.all_gather(segment_ids, axis_name, axis=1, tiled=True))
    return attention.softmax_attention(q, k, v, is_causal, start, segment_ids=ids, method=method)


def fastmax_causal(q: jax.Array, k: jax.Array, v: jax.Array, p: int, axis_name: str | None) -> jax.Array:
    """`ops.fastmax.fastmax_causal` of q, k, v [B, l, H, d], from the start of the sequence."""
    if axis_name is None:
        return fastmax.fastmax_causal(q, k, v, p, fastmax.no_sums(k, p))[0]
    sums = jax.lax.all_gather(fastmax.key_sums(k, v, p), axis_name)
    is_earlier = jnp.arange(len(sums), dtype=jnp.int32) < jax.lax.axis_index(axis_name)
    earlier = jnp.where(is_earlier.reshape(-1, 1, 1, 1, 1), sums, 0).sum(axis=0)
    return fastmax.fastmax_causal(q, k, v, p, earlier)[0]


def fastmax_bidirectional(
    q: jax.Array, k: jax.Array, v: jax.Array, p: int, axis_name: str | None
) -> jax.Array:
    """`ops.fastmax.fastmax_bidirectional` of q, k, v [B, l, H, d]."""
    if axis_name is None:
        return fastmax.fastmax_bidirectional(q, k, v, p)
    return fastmax.attend_to_sums(q, jax.lax.psum(fastmax.key_sums(k, v, p), axis_name), p)


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_a: jax.Array,
    beta: jax.Array | None,
    starts: jax.Array | None,
    axis_name: str | None,
    chunk: int,
) -> jax.Array:
    """o of `ops.delta_rule.delta_rule` from the start of the sequence, with the local rows of all arguments.

    Each device learns what its shard makes of any memory; these maps, composed, give the memory before each
    shard, from which each device runs its shard.
    """
    memory = delta_rule.no_memory(k, v)
    if axis_name is not None:
        parts = jax.lax.all_gather(delta_rule.transfer(k, v, log_a, beta, starts, chunk), axis_name)

        def advance(memory: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return part[0] @ memory + part[1], memory

        memories = jax.lax.scan(advance, memory, parts)[1]
        memory = jax.lax.dynamic_index_in_dim(memories, jax.lax.axis_index(axis_name), keepdims=False)
    return delta_rule.delta_rule(q, k, v, log_a, beta, memory, starts, chunk)[0]


def aft_simple(keys: jax.Array, values: jax.Array, documents: jax.Array, axis_name: str | None) -> aft.Sums:
    """`ops.aft.running_sums` from the start of the sequence.

    Each device sums its shard from zero, then adds the sums of earlier shards wherever the same document
    continues. Keys and values are [B, l, ...], documents [B or 1, l].
    """
    if axis_name is None:
        return aft.running_sums(keys, values, aft.no_sums(keys, values), documents)
    documents = jnp.broadcast_to(documents, keys.shape[:2])
    sums = aft.running_sums(keys, values, aft.no_sums(keys, values), documents)
    here = aft.DocumentSums(documents[..., None, None], sums)
    last = jax.tree.map(lambda x: x[:, -1:], here)
    parts = jax.lax.all_gather(last, axis_name)
    nothing = aft.DocumentSums(last.document, aft.no_sums(keys, values))

    def advance(
        before: aft.DocumentSums, shard: aft.DocumentSums
    ) -> tuple[aft.DocumentSums, aft.DocumentSums]:
        return aft.join(before, shard), before

    starts = jax.lax.scan(advance, nothing, parts)[1]
    index = jax.lax.axis_index(axis_name)
    start = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), starts)
    return aft.join(start, here).sums
