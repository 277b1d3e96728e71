"""Operators over a mesh: sequences sharded over one axis, and rows over all others.

Axes: B batch, L length, l = L / n the shard of L on one of n devices, T queries, C channels, D channels of a
recurrence, H heads, G heads of keys and values, d head_dim, K taps; for the delta rule see `ops.delta_rule`.

Each function has the name and the arguments of the operator in `ops` that it runs, from the start of whole
sequences, and a mesh axis `sequence_axis` over which L is sharded, or None. Without an ambient mesh
(`jax.set_mesh`) it is that operator. With one, each device runs it on its own shards inside `shard_map` (XLA
can shard neither a kernel nor an FFT), and with a sequence axis the devices exchange

    blockwise_conv      all inputs and outputs: an all-to-all from shards of L to shards of C, and one back
    linear_recurrence   the product of the factors and the last state, [B, D] each
    short_conv          the last K - 1 inputs
    shift               the last n inputs
    few_taps_conv       the last K - 1 inputs
    local_attention     the last `window` keys and values
    softmax_attention   all keys and values, which every device then holds
    fastmax_*           sums of features over keys
    delta_rule          what a shard makes of a memory: a matrix and a memory, [B, G, K, K] and [B, G, K, V]
    running_sums        running sums at the last key
    block_dense         nothing

All raise ValueError if the ambient mesh has no axis `sequence_axis`, or its size does not divide L (nor C, in
`blockwise_conv`).
"""

from functools import partial

import jax
import jax.numpy as jnp

from hyena_jax.ops import aft, attention, fastmax, few_taps
from hyena_jax.ops import delta_rule as delta_rule_ops
from hyena_jax.ops import linear_recurrence as recurrence_ops
from hyena_jax.ops import long_conv as long_conv_ops
from hyena_jax.ops import short_conv as short_conv_ops
from hyena_jax.ops.attention import Attention
from hyena_jax.ops.delta_rule import DeltaRule
from hyena_jax.ops.fast import dense
from hyena_jax.ops.fast.derivatives import linear_solve
from hyena_jax.ops.forms import forms_for
from hyena_jax.ops.linear_recurrence import Recurrence
from hyena_jax.ops.long_conv import Convolution
from hyena_jax.ops.mesh import LENGTH, ROWS, shard_axis, sharded, state_before, with_before
from hyena_jax.ops.mesh import axis_size as axis_size  # where users found both
from hyena_jax.ops.mesh import over_shards as over_shards


def blockwise_conv(
    u: jax.Array,
    h: jax.Array,
    skip: jax.Array | None = None,
    block_len: int | None = None,
    future: jax.Array | None = None,
    method: Convolution | None = None,
    sequence_axis: str | None = None,
) -> jax.Array:
    """`ops.long_conv.blockwise_conv` of u [G, w, B, L]; the devices exchange L for channels, and back."""
    # Each device evaluates the filters at its shard of the lags, and then reads those of its channels.
    h, future = (x if x is None else shard_axis(x, sequence_axis, -1) for x in (h, future))

    def local(*given: jax.Array | None, axis_name: str | None) -> jax.Array:
        u, h, skip, future = given

        def convolve(u: jax.Array) -> jax.Array:
            return long_conv_ops.blockwise_conv(u, h, skip, block_len, future, method)

        if axis_name is None:
            return convolve(u)
        whole = jax.lax.all_to_all(u, axis_name, split_axis=1, concat_axis=3, tiled=True)
        return jax.lax.all_to_all(convolve(whole), axis_name, split_axis=3, concat_axis=1, tiled=True)

    return sharded(local, sequence_axis, ("GWBL", "CT", "C", "CT"), "GWBL")(u, h, skip, future)


def short_conv(
    x: jax.Array,
    taps: jax.Array,
    bias: jax.Array,
    axis: int,
    segment_ids: jax.Array | None = None,
    sequence_axis: str | None = None,
) -> jax.Array:
    """`ops.short_conv.short_conv` from the start, of x [..., B, L, ...] with L at the negative `axis`.

    taps [K, ...] and bias [...] have the other axes of x, and 1 where x has B and L; segment_ids [B, L].
    """
    n_before, n_after = x.ndim + axis - 1, -axis - 1
    axes = "wxyz"[:n_before] + ROWS + LENGTH + "ijk"[:n_after]
    of_channels = axes.replace(ROWS + LENGTH, "11")
    ids = None if segment_ids is None else segment_ids.reshape(*segment_ids.shape, *(1,) * n_after)

    def local(
        x: jax.Array, taps: jax.Array, bias: jax.Array, ids: jax.Array | None, axis_name: str | None
    ) -> jax.Array:
        if axis_name is None:
            return short_conv_ops.short_conv(x, taps, bias, axis, None, ids)
        n = len(taps) - 1
        seen = with_before(x, n, axis, axis_name)
        ids = None if ids is None else with_before(ids, n, axis, axis_name)
        y = short_conv_ops.short_conv(seen, taps, bias, axis, None, ids)
        return jax.lax.slice_in_dim(y, n, y.shape[axis], axis=axis)

    in_axes = (axes, "K" + of_channels, of_channels, ROWS + LENGTH + "1" * n_after)
    return sharded(local, sequence_axis, in_axes, axes)(x, taps, bias, ids)


def shift(x: jax.Array, n: int, sequence_axis: str | None = None) -> jax.Array:
    """x_{t-n} of x [B, L, ...]; 0 before the first token."""

    def local(x: jax.Array, axis_name: str | None) -> jax.Array:
        if axis_name is not None:
            return with_before(x, n, 1, axis_name)[:, : x.shape[1]]
        return jnp.pad(x, [(0, 0), (n, 0)] + [(0, 0)] * (x.ndim - 2))[:, : x.shape[1]]

    axes = ROWS + LENGTH + "ijk"[: x.ndim - 2]
    return sharded(local, sequence_axis, (axes,), axes)(x)


def few_taps_conv(
    u: jax.Array,
    h: jax.Array,
    skip: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    method: Convolution | None = None,
    sequence_axis: str | None = None,
) -> jax.Array:
    """`ops.few_taps.few_taps_conv` of u [G, w, B, L]; segment_ids [B, L]."""

    def local(*given: jax.Array | None, axis_name: str | None) -> jax.Array:
        if axis_name is None:
            return few_taps.few_taps_conv(*given, method)
        u, h, skip, segment_ids = given
        n = h.shape[1] - 1
        seen = with_before(u, n, 3, axis_name)
        ids = None if segment_ids is None else with_before(segment_ids, n, 1, axis_name)
        return few_taps.few_taps_conv(seen, h, skip, ids, method)[..., n:]

    return sharded(local, sequence_axis, ("GWBL", "WK", "W", "BL"), "GWBL")(u, h, skip, segment_ids)


def linear_recurrence(
    a: jax.Array,
    x: jax.Array,
    h0: jax.Array | None = None,
    reverse: bool = False,
    method: Recurrence | None = None,
    sequence_axis: str | None = None,
) -> jax.Array:
    """h of `ops.linear_recurrence.linear_recurrence`, for a and x [..., B, L, D], and h0 [..., B, D].

    Each device runs its shard twice: from 0, and from the state before it, which all shards' products of
    factors and last states give.
    """
    axes = "wxyz"[: x.ndim - 3] + "BLI"

    def rows(z: jax.Array, n_axes: int) -> jax.Array:
        return z.reshape(-1, *z.shape[-n_axes:])

    def local(a: jax.Array, x: jax.Array, h0: jax.Array | None, axis_name: str | None) -> jax.Array:
        form = method or forms_for().recurrence
        if axis_name is not None:
            form = partial(_recurrence, axis_name=axis_name, run=form)
        before = None if h0 is None else rows(h0, 1)
        return recurrence_ops.linear_recurrence(rows(a, 2), rows(x, 2), before, reverse, form)[0].reshape(
            x.shape
        )

    return sharded(local, sequence_axis, (axes, axes, axes.replace(LENGTH, "")), axes)(a, x, h0)


def _recurrence(
    a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool, axis_name: str, run: Recurrence
) -> tuple[jax.Array, jax.Array]:
    """`run` of each shard as a form of the recurrence over all of them, which returns the shard's last state.

    h0 counts on the first device alone (in reverse, on the last). h is the solution of a linear equation: see
    `ops.linear_recurrence`.
    """
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

    h = linear_solve(matvec, solve, transpose_solve, a, (h0, x))[1]
    return h, h[:, final].astype(h0.dtype)


def _run(
    a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool, axis_name: str, run: Recurrence
) -> jax.Array:
    last = run(a, x, jnp.zeros_like(h0), reverse)[1]
    # Each shard maps the state h before it to factor h + last.
    part = a.astype(h0.dtype).prod(axis=1), last
    start = state_before(lambda h, part: part[0] * h + part[1], h0, part, axis_name, reverse)
    return run(a, x, start, reverse)[0]


def local_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int,
    segment_ids: jax.Array | None = None,
    method: Attention | None = None,
    sequence_axis: str | None = None,
) -> jax.Array:
    """`ops.attention.local_attention` of q [B, L, H, d], k and v [B, L, G, d]; segment_ids [B, L]."""

    def local(
        q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, axis_name: str | None
    ) -> jax.Array:
        if axis_name is None:
            return attention.local_attention(q, k, v, window, None, segment_ids, method)
        length = q.shape[1]
        n = min(window, length * (jax.lax.axis_size(axis_name) - 1))
        k, v = (with_before(z, n, 1, axis_name) for z in (k, v))
        ids = None if segment_ids is None else with_before(segment_ids, n, 1, axis_name)
        positions = jax.lax.axis_index(axis_name) * length - n + jnp.arange(n + length, dtype=jnp.int32)
        return attention.local_attention(q, k, v, window, positions[None] >= 0, ids, method)

    return sharded(local, sequence_axis, ("BLHd", "BLGd", "BLGd", "BL"), "BLHd")(q, k, v, segment_ids)


def softmax_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    is_causal: bool = False,
    segment_ids: jax.Array | None = None,
    method: Attention | None = None,
    sequence_axis: str | None = None,
) -> jax.Array:
    """`ops.attention.softmax_attention` of q [B, L, H, d] to k and v [B, L, G, d]; segment_ids [B, L]."""

    def local(
        q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, axis_name: str | None
    ) -> jax.Array:
        start, seen = 0, segment_ids
        if axis_name is not None:
            start = jax.lax.axis_index(axis_name) * q.shape[1]
            k, v = (jax.lax.all_gather(z, axis_name, axis=1, tiled=True) for z in (k, v))
            seen = None if seen is None else jax.lax.all_gather(seen, axis_name, axis=1, tiled=True)
        ids = None if segment_ids is None else (segment_ids, seen)
        return attention.softmax_attention(q, k, v, is_causal, start, segment_ids=ids, method=method)

    return sharded(local, sequence_axis, ("BLHd", "BLGd", "BLGd", "BL"), "BLHd")(q, k, v, segment_ids)


def fastmax_causal(
    q: jax.Array, k: jax.Array, v: jax.Array, p: int, sequence_axis: str | None = None
) -> jax.Array:
    """o of `ops.fastmax.fastmax_causal` for q, k, v [B, L, H, d]."""

    def local(q: jax.Array, k: jax.Array, v: jax.Array, axis_name: str | None) -> jax.Array:
        if axis_name is None:
            return fastmax.fastmax_causal(q, k, v, p, fastmax.no_sums(k, p))[0]
        sums = jax.lax.all_gather(fastmax.key_sums(k, v, p), axis_name)
        is_earlier = jnp.arange(len(sums), dtype=jnp.int32) < jax.lax.axis_index(axis_name)
        earlier = jnp.where(is_earlier.reshape(-1, 1, 1, 1, 1), sums, 0).sum(axis=0)
        return fastmax.fastmax_causal(q, k, v, p, earlier)[0]

    return sharded(local, sequence_axis, ("BLHd",) * 3, "BLHd")(q, k, v)


def fastmax_bidirectional(
    q: jax.Array, k: jax.Array, v: jax.Array, p: int, sequence_axis: str | None = None
) -> jax.Array:
    """`ops.fastmax.fastmax_bidirectional` of q, k, v [B, L, H, d]."""

    def local(q: jax.Array, k: jax.Array, v: jax.Array, axis_name: str | None) -> jax.Array:
        if axis_name is None:
            return fastmax.fastmax_bidirectional(q, k, v, p)
        return fastmax.attend_to_sums(q, jax.lax.psum(fastmax.key_sums(k, v, p), axis_name), p)

    return sharded(local, sequence_axis, ("BLHd",) * 3, "BLHd")(q, k, v)


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_a: jax.Array,
    read: jax.Array | None = None,
    write: jax.Array | None = None,
    starts: jax.Array | None = None,
    chunk: int = 64,
    sequence_axis: str | None = None,
    method: DeltaRule = delta_rule_ops.delta_rule,
) -> jax.Array:
    """o of `ops.delta_rule.delta_rule` from an empty memory, by the form `method`.

    What the earlier shards make of any memory, composed, gives the memory before a device's shard.
    """

    def local(*given: jax.Array | None, axis_name: str | None) -> jax.Array:
        *sequences, starts = given
        _, k, v, *_ = sequences
        memory = delta_rule_ops.no_memory(k, v)
        if axis_name is not None:
            part = delta_rule_ops.transfer(*sequences[1:], starts, chunk)
            memory = state_before(lambda memory, part: part[0] @ memory + part[1], memory, part, axis_name)
        return method(*sequences, memory, starts, chunk)[0]

    in_axes = ("BLHK", "BLHK", "BLGV", "BLGK"[: log_a.ndim], "BLGK", "BLGK", "BL")
    return sharded(local, sequence_axis, in_axes, "BLGV")(q, k, v, log_a, read, write, starts)


def running_sums(
    keys: jax.Array, values: jax.Array, documents: jax.Array, sequence_axis: str | None = None
) -> aft.Sums:
    """`ops.aft.running_sums` from the start, of keys and values [B, L, H, d]; documents [B or 1, L].

    The earlier shards' sums are added wherever the same document continues.
    """

    def local(keys: jax.Array, values: jax.Array, documents: jax.Array, axis_name: str | None) -> aft.Sums:
        if axis_name is None:
            return aft.running_sums(keys, values, aft.no_sums(keys, values), documents)
        documents = jnp.broadcast_to(documents, keys.shape[:2])
        sums = aft.running_sums(keys, values, aft.no_sums(keys, values), documents)
        here = aft.DocumentSums(documents[..., None, None], sums)
        last = jax.tree.map(lambda x: x[:, -1:], here)
        nothing = aft.DocumentSums(last.document, aft.no_sums(keys, values))
        start = state_before(aft.join, nothing, last, axis_name)
        return aft.join(start, here).sums

    in_axes = ("BL1D", "BL1D", "1L" if len(documents) == 1 else "BL")
    return sharded(local, sequence_axis, in_axes, "BL1D")(keys, values, documents)


def block_dense(x: jax.Array, kernel: jax.Array, sequence_axis: str | None = None) -> jax.Array:
    """`ops.fast.dense.block_dense` of x [H, B, L, I] and kernel [H, I, J].

    On each device by itself, since XLA cannot merge B and L where both are sharded.
    """

    def local(x: jax.Array, kernel: jax.Array, axis_name: str | None) -> jax.Array:
        y = dense.block_dense(x.reshape(len(x), -1, x.shape[-1]), kernel)
        return y.reshape(*x.shape[:-1], kernel.shape[-1])

    return sharded(local, sequence_axis, ("HBLI", "HIJ"), "HBLJ")(x, kernel)
