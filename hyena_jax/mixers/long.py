"""The base class of the mixers with long convolutions, and their decoding state.

Axes: B batch, L length, T new tokens, S the capacity of a state in tokens, C channels and K taps of the short
FIR, F long filters, M taps of filters with few taps, G groups of channels that share filters, w channels of a
group, W = G w, n modes.

Such a mixer writes its `setup` and one method,

    mix(x [B, T, D], convolutions, deterministic) -> y [B, T, D], convolutions

which computes everything between its convolutions. `convolutions` decides how they run: over a whole sequence
(`ParallelConvolutions`), or continuing a state (`OnlineConvolutions`). Between convolutions the channels are
the first axis, [W, B, T] (`hyena_jax.ops.dense` says why); in a state the batch is, as in every mixer's
state.

The memory of a long convolution depends on its filter. A filter that is the impulse response of a small
recurrence (`modal`, `real_modal`, `s4d`) decodes as that recurrence, in constant time and memory per token:
`hyena_jax.ops.modal_conv`. A filter of few taps (`short`) needs the last inputs, and can keep documents
apart: `hyena_jax.ops.few_taps`. Any other filter needs all earlier inputs: `hyena_jax.ops.online_conv`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hyena_jax.config import MixerConfig, require
from hyena_jax.filters import Modes, is_recurrent
from hyena_jax.mixers.inputs import (
    check_causal,
    check_input,
    check_next,
    check_state_length,
    check_token,
    is_real,
    refuse_segments,
    within,
)
from hyena_jax.mixers.mixing import Mixing, impulse_responses
from hyena_jax.ops import few_taps, modal_conv, online_conv
from hyena_jax.ops.documents import documents
from hyena_jax.ops.few_taps import FewTaps
from hyena_jax.ops.long_conv import Convolution, blockwise_conv, default_method
from hyena_jax.ops.online_conv import FilterTaps, History, OnlineConvolution
from hyena_jax.ops.sequence_parallel import few_taps_conv, on_whole_length, short_convolution
from hyena_jax.ops.sequence_shards import shard_axis, sharded
from hyena_jax.ops.short_conv import advance_history, empty_history, short_conv

# The name by which `jax.checkpoint` policies know the filters of the parallel form.
FILTER = "filter"
# Channels and taps where no short FIR comes first.
NO_SHORT_FIR = (0, 1)


class SharedFilters(NamedTuple):
    """The part of a state that all rows share: filters, with the skips added to lag 0, and tokens seen []."""

    filters: FilterTaps | FewTaps | Modes
    position: jax.Array


class LongState(NamedTuple):
    """The decoding state of a mixer with long convolutions.

    Attributes:
      shared: see `SharedFilters`.
      first: the position of each row's first token, int32 [B].
      short_history: the last inputs of the short FIR, [B, C, K-1].
      long_memory: for each long filter, with `FilterTaps` its inputs [B, S, W], float32; with `FewTaps` its
        last inputs [B, W, M-1], float32; with `Modes` the state of its recurrence [B, W, n], complex64, or
        float32 where the modes are real.
      later: None unless tiles are open; see `online_conv.History`.
    """

    shared: SharedFilters
    first: jax.Array
    short_history: jax.Array
    long_memory: tuple[jax.Array, ...]
    later: tuple[jax.Array, ...] | None


class Convolutions(Protocol):
    """How the convolutions of a mixer run, and their memory.

    Each call returns its output and the convolutions for the next call, as splitting a random key does.
    """

    def masked(self, x: jax.Array) -> jax.Array:
        """x [W, B, T] with 0 in place of padding."""

    def short(self, parts: list[jax.Array], taps: jax.Array, bias: jax.Array) -> tuple[list[jax.Array], Self]:
        """Each part [W, B, T] through the short FIR of its channels.

        Args:
          taps: [C, K], tap 0 meets the current input; the C channels are the parts' in order.
          bias: [C].
        """

    def long(self, u: jax.Array, o: int) -> tuple[jax.Array, Self]:
        """u [W, B, T] through long convolution o, its skip included."""


class ParallelConvolutions(NamedTuple):
    """Convolutions of a whole sequence, without memory.

    Attributes:
      h: filters [F, w, L], or filters of few taps [F, w, M].
      skip: weights of the convolutions' own inputs [F, w], or None.
      future: filters of the reversed sequence [F, w, L], whose output is added, or None.
      has_few_taps: whether h has few taps; `future` and `block_len` are then None.
      segment_ids: the numbers of documents [B, L], or None; only with few taps.
      block_len: steps of a block that is convolved by itself; None: the sequence is one block.
      sequence_axis: mesh axis over which L is sharded, or None.
      method: the form of the long convolutions.
    """

    h: jax.Array
    skip: jax.Array | None
    future: jax.Array | None
    has_few_taps: bool
    segment_ids: jax.Array | None
    block_len: int | None
    sequence_axis: str | None
    method: Convolution

    def masked(self, x: jax.Array) -> jax.Array:
        return x

    def short(self, parts: list[jax.Array], taps: jax.Array, bias: jax.Array) -> tuple[list[jax.Array], Self]:
        if taps.shape[1] > few_taps.MOST_IN_WINDOWS:
            y = self._few_taps(jnp.concatenate(parts), taps, None) + bias[:, None, None]
            return jnp.split(y.astype(parts[0].dtype), len(parts)), self

        def local(
            part: jax.Array,
            taps: jax.Array,
            bias: jax.Array,
            segment_ids: jax.Array | None,
            axis_name: str | None,
        ) -> jax.Array:
            return short_convolution(part, taps, bias, segment_ids, -1, axis_name)

        convolve = sharded(local, self.sequence_axis, ("WBL", "KW11", "W11", "BL"), "WBL")
        channels = _of_parts(len(parts), taps, bias)
        return [
            convolve(part, *of_part, self.segment_ids) for part, of_part in zip(parts, channels, strict=True)
        ], self

    def long(self, u: jax.Array, o: int) -> tuple[jax.Array, Self]:
        if not self.has_few_taps:
            return self._long(u, o), self
        return self._few_taps(u, self.h[o], None if self.skip is None else self.skip[o]), self

    def _few_taps(self, u: jax.Array, h: jax.Array, skip: jax.Array | None) -> jax.Array:
        convolve = partial(few_taps_conv, method=self.method)
        convolve = sharded(convolve, self.sequence_axis, ("GWBL", "WK", "W", "BL"), "GWBL")
        groups = u.reshape(-1, len(h), *u.shape[1:])
        return convolve(groups, h, skip, self.segment_ids).reshape(u.shape)

    def _long(self, u: jax.Array, o: int) -> jax.Array:
        skip, future = (None if x is None else x[o] for x in (self.skip, self.future))
        # Each device evaluates the filters at its shard of the lags; `sharded` then shards channels instead.
        h, future = (x if x is None else shard_axis(x, self.sequence_axis, -1) for x in (self.h[o], future))

        def local(
            u: jax.Array,
            h: jax.Array,
            skip: jax.Array | None,
            future: jax.Array | None,
            axis_name: str | None,
        ) -> jax.Array:
            def convolve(u: jax.Array) -> jax.Array:
                return blockwise_conv(u, h, skip, self.block_len, future, self.method)

            return on_whole_length(convolve, u, axis_name)

        convolve = sharded(local, self.sequence_axis, ("GWBL", "CT", "C", "CT"), "GWBL")
        return convolve(u.reshape(-1, len(h), *u.shape[1:]), h, skip, future).reshape(u.shape)


class OnlineConvolutions(NamedTuple):
    """Convolutions of the tokens that follow a state.

    Attributes:
      convolve: runs one long convolution.
      real: bool [B, T], False at padding; None without padding.
      short_history: the short FIR's inputs before these tokens, [C, B, K-1].
      long_memory: as in `LongState`, updated by the long convolutions that have run.
    """

    convolve: OnlineConvolution
    real: jax.Array | None
    short_history: jax.Array
    long_memory: tuple[jax.Array, ...]

    def masked(self, x: jax.Array) -> jax.Array:
        return x if self.real is None else jnp.where(self.real, x, 0)

    def short(self, parts: list[jax.Array], taps: jax.Array, bias: jax.Array) -> tuple[list[jax.Array], Self]:
        parts = [self.masked(part) for part in parts]
        channels = _of_parts(len(parts), taps, bias)
        histories = jnp.split(self.short_history, len(parts))
        outputs, after = [], []
        for part, of_part, history in zip(parts, channels, histories, strict=True):
            outputs.append(short_conv(part, *of_part, -1, history))
            after.append(advance_history(history, part, -1))
        return outputs, self._replace(short_history=jnp.concatenate(after))

    def long(self, u: jax.Array, o: int) -> tuple[jax.Array, Self]:
        y, memory = self.convolve(u, o)
        return y, self._replace(long_memory=(*self.long_memory[:o], memory, *self.long_memory[o + 1 :]))


def _of_parts(n_parts: int, taps: jax.Array, bias: jax.Array) -> Iterator[tuple[jax.Array, jax.Array]]:
    """The taps [K, W, 1, 1] and the bias [W, 1, 1] of each part."""
    channels = zip(jnp.split(taps, n_parts), jnp.split(bias, n_parts), strict=True)
    return ((taps.T[..., None, None], bias[:, None, None]) for taps, bias in channels)


class LongConvolutionMixer(nn.Module):
    """A mixer around long convolutions; a subclass adds the default of `config`, `setup` and `mix`.

    `setup` sets `filter` (of `hyena_jax.filters`), `skip` [F, w] or None, and `short_taps` [C, K]. A mixer
    with other shapes overrides the properties below.

    Attributes:
      d_model: D.
      max_len: Lmax, the longest sequence; filters are defined relative to it.
      config: the mixer's options.
      n_layers: depth of the residual stack, on which some initialisations depend.
      dtype: of the activations; None follows the input. Filters, FFTs and states stay in float32.
      sequence_axis: mesh axis over which L is sharded; None: each device has the whole sequence.
      platform: see `ops.long_conv.default_method`; decoding takes `fft_conv` everywhere.
    """

    d_model: int
    max_len: int
    config: MixerConfig
    n_layers: int = 1
    dtype: jnp.dtype | None = None
    sequence_axis: str | None = None
    platform: str | None = None

    @staticmethod
    def is_unbounded(config: MixerConfig) -> bool:
        """Whether the state does not grow, so that decoding may continue beyond max_len."""
        return is_recurrent(config.filter) or config.filter.reach is not None

    @property
    def width(self) -> int:
        """W, the channels of a long convolution."""
        return self.d_model

    @property
    def reach(self) -> int | None:
        """M, where the filters have few taps; None where the convolutions are long."""
        return self.config.filter.reach

    @property
    def block_len(self) -> int | None:
        """Steps of a block that is convolved by itself; None where the sequence is one block."""
        return None

    @property
    def skips(self) -> jax.Array | None:
        """Weights of the convolutions' own inputs [F, w], or None."""
        return self.skip

    @property
    def short_shape(self) -> tuple[int, int]:
        """Channels C and taps K of the short FIR."""
        return self.short_taps.shape

    def filters(self, length: int) -> tuple[jax.Array, jax.Array | None]:
        """The filters [F, w, length], and the filters of the future or None."""
        return self.filter(length), None

    def recurrence(self) -> Modes:
        """The recurrence of a filter that has one."""
        return self.filter.recurrence()

    def mix(
        self, x: jax.Array, convolutions: Convolutions, deterministic: bool
    ) -> tuple[jax.Array, Convolutions]:
        """y [B, T, D] of x [B, T, D], and the convolutions after it."""
        raise NotImplementedError

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D]; with few taps, each run of equal segment_ids [B, L] is a document.

        Raises:
          ValueError: for a wrong rank, width or length of x; and with segment_ids, if a long filter would
            reach across document boundaries.
        """
        check_input(x, self.d_model, self.max_len, segment_ids)
        if self.reach is None or not self.config.causal:
            refuse_segments(segment_ids)
        return self.mix(x, self.parallel_convolutions(x.shape[1], segment_ids), deterministic)[0]

    def parallel_convolutions(
        self, length: int, segment_ids: jax.Array | None = None
    ) -> ParallelConvolutions:
        """The convolutions of a whole sequence of `length` tokens."""
        reach = self.reach
        h, future = self.filters(length if reach is None else min(length, reach))
        return ParallelConvolutions(
            h=checkpoint_name(h, FILTER),
            skip=self.skips,
            future=future,
            has_few_taps=reach is not None,
            segment_ids=None if segment_ids is None else documents(segment_ids).number,
            block_len=self.block_len,
            sequence_axis=self.sequence_axis,
            method=default_method(self.platform),
        )

    def channel_matrices(self, operator: Callable[[jax.Array], jax.Array], v: jax.Array) -> Mixing:
        """The mixing matrices of an operator on values v [W, B, L], one for each channel."""
        matrices = impulse_responses(operator, v, -1, self.config.causal)
        return Mixing(matrices.swapaxes(0, 1), v.transpose(1, 2, 0)[..., None])

    def init_state(self, batch_size: int, max_len: int) -> LongState:
        """The state before the first token of a sequence of at most `max_len` tokens.

        Raises:
          ValueError: for a mixer that is not causal, or a max_len above the module's.
        """
        check_causal(self.config)
        check_state_length(max_len, self.max_len)
        if self.reach is not None:
            h, _ = self.filters(self.reach)
            filters, memory = few_taps.empty(h, self.skips, batch_size, self.width)
            dtype = h.dtype
        elif self.is_unbounded(self.config):
            filters, memory = modal_conv.empty(self.recurrence(), self.skips, batch_size, self.width)
            dtype = filters.lag_zero.dtype
        else:
            h, _ = self.filters(max_len)
            filters, memory = online_conv.empty(h, self.skips, batch_size, self.width, self.block_len)
            dtype = h.dtype
        return LongState(
            shared=SharedFilters(filters, jnp.zeros((), jnp.int32)),
            first=jnp.zeros(batch_size, jnp.int32),
            short_history=empty_history(batch_size, *self.short_shape, dtype),
            long_memory=memory,
            later=None,
        )

    def prefill(
        self, state: LongState, x: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[LongState, jax.Array]:
        """The next T tokens x [B, T, D] at once; open tiles are closed.

        Raises:
          ValueError: for a wrong shape of x or lengths, or more tokens than the state's capacity.
        """
        lengths = check_next(x, self.d_model, self.max_len, len(state.first), lengths)
        state, n_tokens = map_histories(online_conv.close_tiles, state), x.shape[1]
        state = state if lengths is None else state._replace(first=n_tokens - lengths)
        filters = state.shared.filters
        if isinstance(filters, Modes):
            convolve = modal_conv.prefill(filters, state.long_memory)
        elif isinstance(filters, FewTaps):
            convolve = few_taps.prefill(filters, state.long_memory)
        else:
            room = state.long_memory[0].shape[1]
            require(n_tokens <= room, "sequence length", n_tokens, f"in 1..max_len={room}")
            convolve = online_conv.prefill(_history(state), self.block_len)
        after, y = self._continue(state, x, convolve, is_real(lengths, n_tokens))
        return after, self._within(after, y)

    def step(self, state: LongState, x: jax.Array) -> tuple[LongState, jax.Array]:
        """The next token x [B, D]: O(n) with modes, O(M) with few taps; with a history O(S), or less with
        tiles."""
        check_token(x, self.d_model, len(state.first))
        filters = state.shared.filters
        if isinstance(filters, Modes):
            convolve = modal_conv.step(filters, state.long_memory)
        elif isinstance(filters, FewTaps):
            convolve = few_taps.step(filters, state.long_memory)
        else:
            convolve = online_conv.step(_history(state))
        after, y = self._continue(state, x[:, None], convolve, None)
        return after, self._within(after, y)[:, 0]

    def _within(self, after: LongState, y: jax.Array) -> jax.Array:
        """y, or NaN if a history has no room for its tokens."""
        if isinstance(after.shared.filters, Modes | FewTaps):
            return y
        return within(y, after.shared.position, after.long_memory[0].shape[1])

    def _continue(
        self, state: LongState, x: jax.Array, convolve: OnlineConvolution, real: jax.Array | None
    ) -> tuple[LongState, jax.Array]:
        """The state after x [B, T, D], and y."""
        before = OnlineConvolutions(convolve, real, state.short_history.swapaxes(0, 1), state.long_memory)
        y, after = self.mix(x, before, True)
        filters, position = state.shared
        state = state._replace(
            shared=SharedFilters(filters, position + x.shape[1]),
            short_history=after.short_history.swapaxes(0, 1),
            long_memory=after.long_memory,
        )
        return state, y


def map_histories(function: Callable[[History], History], tree: Any) -> Any:
    """A mixer's or a model's state with `function` applied to the history of its long convolutions.

    `online_conv.open_tiles`, `absorb` and `close_tiles` are such functions. States without a history stay as
    they are.
    """

    def mapped(node: Any) -> Any:
        if not _has_history(node):
            return node
        filters, position, first, inputs, later = function(_history(node))
        return LongState(SharedFilters(filters, position), first, node.short_history, inputs, later)

    return jax.tree.map(mapped, tree, is_leaf=_has_history)


def has_tiles(tree: Any) -> bool:
    """Whether tiles are open in a mixer's or a model's state."""
    nodes = jax.tree.leaves(tree, is_leaf=_has_history)
    return any(_has_history(node) and node.later is not None for node in nodes)


def _has_history(node: Any) -> bool:
    return isinstance(node, LongState) and isinstance(node.shared.filters, FilterTaps)


def _history(state: LongState) -> History:
    filters, position = state.shared
    return History(filters, position, state.first, state.long_memory, state.later)
