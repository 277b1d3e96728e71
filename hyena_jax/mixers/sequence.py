"""What a mixer does along the sequence: `seq`, the second argument of `Mixer.mix`.

Its operators are

    fir, shift, before, cache    the last few inputs, or all of them
    recur                        h_t = a_t h_{t-1} + x_t
    update                       a matrix memory, by the delta rule
    attend                       softmax attention
    filters, conv                long convolutions
    scan                         any function of a carry and a token
    carry, once                  what these are built from, and what you build your own from
    of_first_layer               what the first layer of this kind had for the same tokens

Each operator is one call of `carry`, with two forms of the same function: `whole`, over whole sequences, and
`run`, from a memory to the memory after these tokens. `Parallel` calls the first and has no memory; `Online`
calls the second and keeps the memory. `before`, `cache` and `carry` leave padding and packed documents to
their caller (`masked`, `positions`, `documents`, `refuse_documents`); all others ignore padding, and keep
documents apart or refuse them.

Axes: B batch, T tokens, C channels, K taps, S tokens that a state has room for; F long filters of w channels,
and W = G w channels of a long convolution. For attention and the matrix memory see `ops.attention` and
`ops.delta_rule`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hyena_jax.mixers.inputs import sums_dtype, within
from hyena_jax.ops import attention, few_taps, linear_recurrence, modal_conv, online_conv, shards
from hyena_jax.ops.delta_rule import no_memory
from hyena_jax.ops.documents import Documents
from hyena_jax.ops.fast.derivatives import tied
from hyena_jax.ops.few_taps import FewTaps
from hyena_jax.ops.forms import Forms
from hyena_jax.ops.modal_conv import Modes
from hyena_jax.ops.online_conv import FilterTaps, History
from hyena_jax.ops.short_conv import advance_history, short_conv
from hyena_jax.system.errors import require

Handed = dict[str, jax.Array]
"""What layers hand on to later ones [B, T, ...], by name."""

FILTER = "filter"
"""The name by which `jax.checkpoint` policies know the filters of the parallel form."""


class Inputs(NamedTuple):
    """The memory of a long convolution with any filter, float32: see `ops.online_conv.History`.

    All inputs [B, S, W]; and with open tiles their contribution to later outputs [B, S, W], else None.
    """

    inputs: jax.Array
    later: jax.Array | None


class Filters(NamedTuple):
    """Long filters, from `Sequence.filters` to `Sequence.conv`.

    Attributes:
      past: h [F, w, L], or with few taps [F, w, M]; None where a state has them already, or has the modes.
      future: filters of the reversed sequence [F, w, L], whose output is added, or None.
      modes: the recurrence whose impulse response h is, where a state begins with it; else None.
      skip: weights of the convolutions' own inputs [F, w], or None.
      block_len: steps of a block that is convolved by itself; None: the sequence is one block.
      has_few_taps: h reaches no further than M tokens.
    """

    past: jax.Array | None
    future: jax.Array | None
    modes: Modes | None
    skip: jax.Array | None
    block_len: int | None
    has_few_taps: bool


class Sequence:
    """T tokens of B rows.

    Attributes:
      shape: B and T.
      position: of the first token in its row, int32 []; padding counts.
      index: of each token in its row, int32 [T].
      positions: of each token in its document, int32 [B or 1, T]; padding has negative ones.
      first: of a state, the index of each row's first real token, int32 [B].
      documents: of a packed batch, or None.
      real: bool [B, T], False at padding; None where there is none.
      capacity: tokens that an operator's memory must have room for, or None where the memories exist already.
      is_online: a state continues, rather than whole sequences.
      is_step: T is 1, and operators may take a shorter form for one token.
      sequence_axis: mesh axis over which whole sequences are sharded, or None.
      forms: of the operators that have several.
      handed: what earlier layers hand on, by name, for the same tokens: see `of_first_layer`.
    """

    shape: tuple[int, int]
    position: jax.Array
    index: jax.Array
    positions: jax.Array
    first: jax.Array
    forms: Forms
    documents: Documents | None = None
    real: jax.Array | None = None
    capacity: int | None = None
    is_online = False
    is_step = False
    sequence_axis: str | None = None
    handed: Handed

    def carry(
        self,
        name: str,
        empty: Callable[[], Any],
        run: Callable[[Any], tuple[Any, Any]],
        whole: Callable[[], Any] | None = None,
    ) -> Any:
        """The output y of an operator with a memory.

        Args:
          name: of the memory in the state; calls of the same name are numbered.
          empty: the memory before the first token, a pytree whose leaves start with B; its structure, shapes
            and dtypes stay.
          run: memory -> y, the memory after these tokens.
          whole: y of whole sequences, where another form than run(empty()) is faster, keeps documents apart,
            or can be sharded. Without it every device gathers a sharded sequence, with a warning.

        Raises:
          UserError: while decoding, for a call inside of one's own scan, vmap, jit or remat, for calls that
            depend on the number of tokens, and for a memory that changes its shape or dtype.
        """
        raise NotImplementedError

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """make(), of what no token changes, such as a filter: computed once a generation, in `init_state`.

        It goes with the next `carry` of the same name.
        """
        raise NotImplementedError

    def masked(self, x: jax.Array, axis: int = 1, fill: float = 0) -> jax.Array:
        """x with `fill` at padding; `axis` is time, and the axis before it the batch."""
        if self.real is None:
            return x
        after = x.ndim - axis - 1 if axis >= 0 else -axis - 1
        return jnp.where(self.real.reshape(*self.real.shape, *(1 for _ in range(after))), x, fill)

    def starts(self, of_rows: bool = True) -> jax.Array | None:
        """Bool [B, T], or None: where a document follows another and, with `of_rows`, a row's first token."""
        raise NotImplementedError

    def gathers(self, name: str) -> None:
        """Warns, with a sharded sequence, that the operator `name` has no sharded form."""

    def refuse_documents(self) -> None:
        """Raises UserError for a packed batch: the mixer would mix across the boundaries of documents."""

    def values(self, v: jax.Array, axes: str) -> jax.Array:
        """Returns v, and marks it as the values that the mixer's matrices mix: see `mixers.mixing`."""
        return v

    def mixed(self, o: jax.Array, axes: str) -> jax.Array:
        """Returns o, and marks it as the result of mixing these values, linear in them."""
        return o

    def of_first_layer(self, name: str, x: jax.Array) -> jax.Array:
        """x [B, T, ...] of the first layer that calls this by `name`, in that layer and in all later ones.

        Decoding keeps no memory of it. A mixer by itself is its own first layer.
        """
        return self.handed.setdefault(name, x)

    # The operators.

    def fir(
        self,
        x: jax.Array | list[jax.Array],
        taps: jax.Array,
        bias: jax.Array | None = None,
        axis: int = 1,
    ) -> jax.Array | list[jax.Array]:
        """y_t = bias + sum_k taps_k x_{t-k}, channel by channel, in the dtype of x.

        Args:
          x: [..., B, T, ...], T at `axis`; the other axes together are the channels C, in order. Or a list of
            such parts of equal shapes, whose channels follow each other; y is then a list too.
          taps: [C, K], tap 0 meets the current input.
          bias: [C].
        """
        parts = x if isinstance(x, list) else [x]
        shape, dtype = parts[0].shape, parts[0].dtype
        axis = axis - len(shape) if axis >= 0 else axis
        batch = len(shape) + axis - 1
        must = f"[..., B, T, ...], with T at axis={axis} and B={self.shape[0]}"
        require(batch >= 0 and shape[batch] == self.shape[0], "the shape of x in seq.fir", shape, must)
        own = (*shape[:batch], 1, 1, *shape[batch + 2 :])
        n_channels = len(parts) * math.prod(own)
        fits = jnp.shape(taps) == (n_channels, jnp.size(taps) // n_channels) and jnp.size(taps) > 0
        must = f"[C, K], K taps for each of the C={n_channels} channels of x"
        require(fits, "the shape of taps in seq.fir", jnp.shape(taps), must)
        of_bias = (n_channels,) if bias is None else jnp.shape(bias)
        must = f"[C], with C={n_channels}"
        require(of_bias == (n_channels,), "the shape of bias in seq.fir", of_bias, must)
        n_taps = taps.shape[1]
        kernels = [some.T.reshape(n_taps, *own) for some in jnp.split(taps, len(parts))]
        biases = [jnp.zeros(own, dtype)] * len(parts)
        if bias is not None:
            biases = [some.reshape(own) for some in jnp.split(bias, len(parts))]
        of_parts = list(zip(parts, kernels, biases, strict=True))
        channels = 1 if batch > 0 else -1  # of a memory: one for all parts, which a step then moves at once

        def run(memory: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            outputs, after = [], []
            histories = jnp.split(memory, len(parts), axis=channels)
            for (part, kernel, bias), history in zip(of_parts, histories, strict=True):
                inputs = self.masked(part, axis).astype(memory.dtype)  # H3 has 64 taps, too many for bfloat16
                before = jnp.moveaxis(history, 0, batch)
                outputs.append(short_conv(inputs, kernel, bias, axis, before).astype(dtype))
                after.append(jnp.moveaxis(advance_history(before, inputs, axis), batch, 0))
            return outputs, jnp.concatenate(after, axis=channels)

        def whole() -> list[jax.Array]:
            if n_taps > few_taps.MAX_IN_WINDOWS and axis == -1:
                channels_first = jnp.concatenate([part.reshape(-1, *shape[batch:]) for part in parts])
                y = self._few_taps_conv(channels_first, taps, None)
                y = (y + jnp.concatenate(biases).reshape(-1, 1, 1)).astype(dtype)
                return [some.reshape(shape) for some in jnp.split(y, len(parts))]
            ids, sequence_axis = self._document_ids, self.sequence_axis
            outputs = [shards.short_conv(*of_part, axis, ids, sequence_axis) for of_part in of_parts]
            return [self.forms.keep(y) for y in outputs]

        def empty() -> jax.Array:
            history = (shape[batch], *shape[:batch], n_taps - 1, *shape[batch + 2 :])
            zeros = jnp.zeros(history, sums_dtype(dtype))
            return jnp.concatenate([zeros] * len(parts), axis=channels)

        y = self.carry("fir", empty, run, whole)
        return y if isinstance(x, list) else y[0]

    def shift(self, x: jax.Array, n: int = 1) -> jax.Array:
        """x_{t-n} of x [B, T, ...]; 0 before the first token of a document."""

        def run(before: jax.Array) -> tuple[jax.Array, jax.Array]:
            seen = jnp.concatenate([before, self.masked(x).astype(before.dtype)], axis=1)
            return seen[:, : x.shape[1]].astype(x.dtype), seen[:, x.shape[1] :]

        def whole() -> jax.Array:
            y = shards.shift(x, n, self.sequence_axis)
            known = self.positions.reshape(*self.positions.shape, *(1 for _ in x.shape[2:])) >= n
            return y if self.documents is None else jnp.where(known, y, 0)

        return self.carry("shift", lambda: jnp.zeros_like(x, shape=(len(x), n, *x.shape[2:])), run, whole)

    def before(self, x: jax.Array, n: int, fill: float = 0) -> jax.Array:
        """The n inputs before x [B, T, ...], oldest first: [B, n, ...], with `fill` before the first input.

        They include padding and other documents.
        """

        def run(before: jax.Array) -> tuple[jax.Array, jax.Array]:
            seen = jnp.concatenate([before, x.astype(before.dtype)], axis=1)
            return before.astype(x.dtype), seen[:, seen.shape[1] - n :]

        return self.carry("before", lambda: jnp.full_like(x, fill, shape=(len(x), n, *x.shape[2:])), run)

    def cache(self, x: jax.Array, fill: float = 0) -> jax.Array:
        """All inputs: x [B, T, ...] of whole sequences, else [B, S, ...] with `fill` where none is yet.

        The caller masks padding and slots beyond `index`. Without room for x, the result is NaN.
        """

        def run(before: jax.Array) -> tuple[jax.Array, jax.Array]:
            n_tokens, room = x.shape[1], before.shape[1]
            require_room(n_tokens, room)
            after = _written(before, within(x, self.position + n_tokens, room), self.position)
            return after, after

        def empty() -> jax.Array:
            return jnp.full_like(x, fill, shape=(len(x), self.capacity, *x.shape[2:]))

        return self.carry("cache", empty, run, lambda: x)

    def recur(self, a: jax.Array, x: jax.Array) -> jax.Array:
        """h_t = a_t ⊙ h_{t-1} + x_t, with h 0 before a document; in the dtype of x, computed in float32.

        Args:
          a: [], [C], or with the axes of x; float32, as bfloat16 near 1 has steps of 0.004.
          x: [..., B, T, C].

        Both are real: complex factors are rotations of pairs, for `scan`.
        """
        dtypes, must = (
            f"{jnp.result_type(a)}, {x.dtype}",
            "real (write a complex factor as a rotation of pairs, with seq.scan)",
        )
        is_real = not (jnp.iscomplexobj(a) or jnp.iscomplexobj(x))
        require(is_real, "the dtypes of a and x in seq.recur", dtypes, must)
        allowed = f"[], [C] or of the {x.ndim} axes of x {x.shape}"
        require(jnp.ndim(a) in (0, 1, x.ndim), "the shape of a in seq.recur", jnp.shape(a), allowed)
        a, method = jnp.broadcast_to(a, x.shape), self.forms.recurrence

        def rows(z: jax.Array, n_axes: int) -> jax.Array:
            return z.reshape(-1, *z.shape[-n_axes:])

        def run(h: jax.Array) -> tuple[jax.Array, jax.Array]:
            before = jnp.moveaxis(h, 0, -2)
            inputs = rows(self.masked(x, -2), 2)
            y, last = linear_recurrence.linear_recurrence(rows(a, 2), inputs, rows(before, 1), method=method)
            return y.reshape(x.shape), jnp.moveaxis(last.reshape(before.shape), -2, 0)

        def whole() -> jax.Array:
            starts = self.starts(of_rows=False)
            factors = a if starts is None else jnp.where(starts[..., None], 0, a)
            return shards.linear_recurrence(factors, x, method=method, sequence_axis=self.sequence_axis)

        shape = (x.shape[-3], *x.shape[:-3], x.shape[-1])
        return self.carry("recur", lambda: jnp.zeros(shape, sums_dtype(x.dtype)), run, whole)

    def update(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        log_a: jax.Array,
        read: jax.Array | None = None,
        write: jax.Array | None = None,
        chunk: int = 64,
    ) -> jax.Array:
        """o [B, m T, G, V] of the delta rule, float32 at least; arguments as of `ops.delta_rule`.

        At each token S = diag(a) S, then S = S - e (S^T r)^T + k v^T for `read` r and `write` e; o = S^T q.
        With read=None nothing is erased, S = diag(a) S + k v^T: linear attention with decay, as in Mamba-2.
        The delta rule, where a new value replaces the old one at its key, has read = beta k, v = beta v.
        """
        method = self.forms.delta_rule

        def run(memory: jax.Array) -> tuple[jax.Array, jax.Array]:
            n_updates = v.shape[1] // log_a.shape[1]
            real = None if self.real is None else jnp.repeat(self.real, n_updates, axis=1)
            values = v if real is None else jnp.where(real[..., None, None], v, 0)
            return method(q, k, values, log_a, read, write, memory, chunk=chunk)

        def whole() -> jax.Array:
            starts = self.starts(of_rows=False)
            return shards.delta_rule(q, k, v, log_a, read, write, starts, chunk, self.sequence_axis, method)

        return self.carry("update", lambda: no_memory(k, v), run, whole)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None = None, is_causal: bool = True
    ) -> jax.Array:
        """Softmax attention [B, T, H, d], to all keys or to the last `window` and the current one."""
        require(window is None or window >= 1, "window in seq.attend", window, "at least 1, or None")
        method = self.forms.attention

        def whole() -> jax.Array:
            ids, axis = self._document_ids, self.sequence_axis
            if window is None:
                return shards.softmax_attention(q, k, v, is_causal, ids, method, axis)
            return shards.local_attention(q, k, v, window, ids, method, axis)

        def all_keys(cache: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, tuple]:
            room = cache[0].shape[1]
            require_room(k.shape[1], room)
            keys, values = (_written(c, z, self.position) for c, z in zip(cache, (k, v), strict=True))
            real = jnp.arange(room, dtype=jnp.int32) >= self.first[:, None]
            o = attention.softmax_attention(q, keys, values, True, self.position, real, None, method)
            return within(o, self.position + k.shape[1], room), (keys, values)

        def last_keys(rings: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, tuple]:
            """Position t is in slot t % S."""
            position, n_slots = self.position, rings[0].shape[1]
            if self.is_step:  # overwrites the oldest key
                slot = position % n_slots
                keys, values = (_written(ring, z, slot) for ring, z in zip(rings, (k, v), strict=True))
                age = (position - jnp.arange(n_slots, dtype=jnp.int32)) % n_slots
                real = position - age >= self.first[:, None]
                return attention.softmax_attention(q, keys, values, real=real, method=method), (keys, values)
            # The slots rotated so that the oldest key comes first, then the new ones.
            keys, values = (
                jnp.concatenate([jnp.roll(ring, -position % n_slots, axis=1), new.astype(ring.dtype)], axis=1)
                for ring, new in zip(rings, (k, v), strict=True)
            )
            positions = position - n_slots + jnp.arange(keys.shape[1], dtype=jnp.int32)
            # No query sees the oldest slot: it is window + 1 before the first query, or still empty. A step
            # sees no more than the ring, which max_len can make smaller than the window.
            real, seen = positions[1:] >= self.first[:, None], min(window, max(n_slots - 1, 1))
            o = attention.local_attention(q, keys[:, 1:], values[:, 1:], seen, real, None, method)
            after = position + k.shape[1]
            return o, tuple(jnp.roll(z[:, -n_slots:], after % n_slots, axis=1) for z in (keys, values))

        def empty() -> tuple[jax.Array, jax.Array]:
            room = self.capacity if window is None else min(window + 1, self.capacity)
            return tuple(jnp.zeros_like(z, shape=(len(z), room, *z.shape[2:])) for z in (k, v))

        return self.carry("attend", empty, all_keys if window is None else last_keys, whole)

    def scan(self, f: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any) -> Any:
        """ys [B, T, ...] of f(carry, x) -> carry, y, token by token, for a carry [B, ...] and xs [B, T, ...].

        The carry is `init` at the start of each document; it keeps its shapes and dtypes.
        """
        self.gathers("scan")
        # Under `shard_map` a carry must vary over devices as its inputs do.
        init = tied(jax.tree.map(jnp.asarray, init), xs)

        def run(carry: Any, starts: jax.Array | None = None) -> tuple[Any, Any]:
            def advance(carry: Any, now: tuple) -> tuple[Any, Any]:
                x, is_start, is_real = now
                carry = carry if is_start is None else _where(is_start, init, carry)
                after, y = f(carry, x)
                return (after if is_real is None else _where(is_real, after, carry)), y

            time_first = jax.tree.map(lambda x: x.swapaxes(0, 1), (xs, starts, self.real))
            carry, ys = jax.lax.scan(advance, carry, time_first)
            return jax.tree.map(lambda y: y.swapaxes(0, 1), ys), carry

        return self.carry("scan", lambda: init, run, lambda: run(init, self.starts(of_rows=False))[0])

    def filters(
        self,
        long_filter: nn.Module,
        skip: jax.Array | None,
        expand: Callable[[jax.Array], jax.Array] = lambda h: h,
        block_len: int | None = None,
        is_bidirectional: bool = False,
    ) -> Filters:
        """The filters of a module of `hyena_jax.filters`, for `conv`.

        A filter of few taps keeps documents apart; any other refuses them.

        Args:
          skip, block_len: as of `Filters`.
          expand: from the filters' own channels to w.
          is_bidirectional: the second half of the filters is of the future.
        """
        is_plain = block_len is None and not is_bidirectional
        reach = long_filter.config.reach if is_plain else None
        past = future = modes = None
        if reach is None:
            self.refuse_documents()
        if self.is_online and is_plain and reach is None and hasattr(long_filter, "recurrence"):
            modes = jax.tree.map(expand, long_filter.recurrence()) if self.capacity is not None else None
        elif self.capacity is not None:
            length = self.capacity
            if reach is not None:  # a state needs all taps, since it does not end with its capacity
                length = reach if self.is_online else min(reach, length)
            past = expand(long_filter(length))
            if is_bidirectional:
                past, future = jnp.split(past, 2)
            past = past if self.is_online else checkpoint_name(past, FILTER)
        return Filters(past, future, modes, skip, block_len, reach is not None)

    def conv(self, u: jax.Array, filters: Filters, o: int) -> jax.Array:
        """u [W, B, T] through long convolution o, its skip included, in the dtype of u.

        The memory depends on the filter: modes of a small recurrence (`ops.modal_conv`), the last inputs for
        few taps (`ops.few_taps`), else all inputs (`ops.online_conv`).
        """
        skip = None if filters.skip is None else filters.skip[o]
        for all_filters in (filters.past, filters.modes):
            if all_filters is not None:
                n = len(jax.tree.leaves(all_filters)[0])
                require(o < n, "the filter of seq.conv", o, f"below their number, {n}")

        def of_state() -> Modes | FewTaps | FilterTaps:
            if filters.modes is not None:
                return modal_conv.with_skip(jax.tree.map(lambda x: x[o], filters.modes), skip)
            if filters.has_few_taps:
                return few_taps.with_skip(filters.past[o], skip)
            return online_conv.filter_taps(filters.past[o], skip, filters.block_len)

        kept = self.once("conv", of_state) if self.is_online else None

        def empty() -> jax.Array | Inputs:
            width, batch, _ = u.shape
            if isinstance(kept, FilterTaps):
                return Inputs(online_conv.no_inputs(kept, batch, width), None)
            return (modal_conv if isinstance(kept, Modes) else few_taps).empty(kept, batch, width)

        def run(memory: jax.Array | Inputs) -> tuple[jax.Array, jax.Array | Inputs]:
            inputs = self.masked(u, -1)
            if not isinstance(kept, FilterTaps):
                kind = modal_conv if isinstance(kept, Modes) else few_taps
                return (kind.step if self.is_step else kind.prefill)(kept, memory, inputs)
            room = memory.inputs.shape[1]
            require_room(u.shape[-1], room)
            history = History(kept, self.position, self.first, *memory)
            if self.is_step:
                y, after = online_conv.step(history, inputs)
            else:
                y, after = online_conv.prefill(history, inputs, filters.block_len)
            return within(y, self.position + u.shape[-1], room), memory._replace(inputs=after)

        def whole() -> jax.Array:
            if filters.has_few_taps:
                return self._few_taps_conv(u, filters.past[o], skip)
            future = None if filters.future is None else filters.future[o]
            groups = u.reshape(-1, len(filters.past[o]), *u.shape[1:])
            method, axis = self.forms.convolution, self.sequence_axis
            y = shards.blockwise_conv(groups, filters.past[o], skip, filters.block_len, future, method, axis)
            return y.reshape(u.shape)

        return self.carry("conv", empty, run, whole)

    def _few_taps_conv(self, u: jax.Array, h: jax.Array, skip: jax.Array | None) -> jax.Array:
        """u [W, B, T] through filters of few taps [w, M]."""
        groups, ids = u.reshape(-1, len(h), *u.shape[1:]), self._document_ids
        method = self.forms.convolution
        return shards.few_taps_conv(groups, h, skip, ids, method, self.sequence_axis).reshape(u.shape)

    @property
    def _document_ids(self) -> jax.Array | None:
        return None if self.documents is None else self.documents.number


def require_room(n_tokens: int, room: int) -> None:
    """Raises UserError for more tokens at once than a state has room for."""
    require(n_tokens <= room, "sequence length", n_tokens, f"in 1..max_len={room}")


def _written(cache: jax.Array, x: jax.Array, position: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(cache, x.astype(cache.dtype), position, axis=1)


def _where(condition: jax.Array, x: Any, y: Any) -> Any:
    """The leaves of x where `condition` [B], else those of y."""
    return jax.tree.map(lambda a, b: jnp.where(condition.reshape(-1, *(1 for _ in b.shape[1:])), a, b), x, y)
