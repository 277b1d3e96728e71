"""The four mixers of the attention-free transformer.

    y_t = W_o ( sigmoid(q_t) ⊙ sum_{s<=t} exp(k_s + w_{t,s}) v_s / sum_{s<=t} exp(k_s + w_{t,s}) ) + b_o

From Zhai et al. 2021, arXiv 2105.14103. The four differ in the position biases w, and therefore in the memory
that decoding needs. Axes: B batch, L length, T new tokens, D channels, H heads (1 except in AFT-conv), c
channels of a head's key, d of its value, K the window or the taps, R rank.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import AFTConvConfig, AFTFullConfig, AFTLocalConfig, AFTSimpleConfig, require
from hyena_jax.initializers import initializers
from hyena_jax.mixers.inputs import (
    Shared,
    check_input,
    check_next,
    check_state_length,
    is_real,
    sums_dtype,
    within,
)
from hyena_jax.mixers.mixing import Mixing, impulse_responses
from hyena_jax.ops import aft, sequence_parallel
from hyena_jax.ops.aft_blocks import full_sums, window_sums
from hyena_jax.ops.sequence_shards import sharded

# The paper initialises the parameters of position biases as N(0, 10^-2); we take 10^-2 as the variance.
position_init = nn.initializers.normal(0.1)


class LastKeys(NamedTuple):
    """The last K - 1 keys [B, K-1, H, c] and values [B, K-1, H, d], and the sums over all earlier tokens."""

    keys: jax.Array
    values: jax.Array
    before: aft.Sums


class Cache(NamedTuple):
    """All keys and values [B, max_len, 1, D]; keys of padding and of tokens still to come are `aft.EMPTY`."""

    keys: jax.Array
    values: jax.Array


class AFTState(NamedTuple):
    """The operator's memory, float32, and the index of each row's first real token [B]."""

    shared: Shared
    first: jax.Array
    memory: aft.Sums | LastKeys | Cache


class AFT(nn.Module):
    """The mixer contract for all four; a subclass adds its memory and its sums over keys.

    `_empty(keys, values)` returns the memory before the first token, for keys and values of the given shapes
    [B, max_len, ...] and dtypes. `_continue(memory, keys, values, places, position)` returns the sums of the
    next T tokens, the first of which has index `position`, and the memory after them.
    """

    d_model: int
    max_len: int
    config: AFTSimpleConfig | AFTConvConfig | AFTLocalConfig | AFTFullConfig
    n_layers: int = 1
    dtype: jnp.dtype | None = None

    def setup(self) -> None:
        self.config.check(self.d_model, self.max_len)
        init = initializers(self.config.init, self.n_layers, self.d_model, self.d_model)
        self.qkv_proj = nn.Dense(
            2 * self.d_model + self.key_width,
            dtype=self.dtype,
            kernel_init=init.kernel,
            bias_init=init.bias,
        )
        self.out_proj = nn.Dense(
            self.d_model, dtype=self.dtype, kernel_init=init.out_kernel, bias_init=init.out_bias
        )

    @property
    def n_heads(self) -> int:
        """H."""
        return 1

    @property
    def key_width(self) -> int:
        """H c, the channels of a token's keys."""
        return self.d_model

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D]; each run of equal segment_ids [B, L] is a document.

        Raises:
          ValueError: for a wrong rank, width or length of x.
        """
        check_input(x, self.d_model, self.max_len, segment_ids)
        q, keys, values = self._project(x, None)
        return self._output(q, self._parallel(keys, values, aft.places(x.shape[1], segment_ids)))

    def mixing_matrix(self, x: jax.Array) -> Mixing:
        """One matrix for each channel, from v to the output projection, with sigmoid(q) in it."""
        q, keys, values = self._project(x, None)
        places = aft.places(x.shape[1])

        def operator(v: jax.Array) -> jax.Array:
            return self._gated(q, self._parallel(keys, v, places)).reshape(v.shape)

        matrices = impulse_responses(operator, values, 1, True)
        return Mixing(
            matrices.reshape(len(x), self.d_model, *matrices.shape[3:]), values.reshape(x.shape)[..., None]
        )

    def init_state(self, batch_size: int, max_len: int) -> AFTState:
        """The state before the first token of a sequence of at most `max_len` tokens."""
        check_state_length(max_len, self.max_len)
        dtype = sums_dtype(self.qkv_proj.variables["params"]["kernel"].dtype)
        keys = jnp.full((batch_size, max_len, self.n_heads, self.key_width // self.n_heads), aft.EMPTY, dtype)
        values = jnp.zeros((batch_size, max_len, self.n_heads, self.d_model // self.n_heads), dtype)
        first = jnp.zeros(batch_size, jnp.int32)
        return AFTState(Shared(jnp.zeros((), jnp.int32)), first, self._empty(keys, values))

    def prefill(
        self, state: AFTState, x: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[AFTState, jax.Array]:
        """The next T tokens x [B, T, D] at once; positions count from the first real token of a row."""
        lengths = check_next(x, self.d_model, self.max_len, len(state.first), lengths)
        n_tokens, position = x.shape[1], state.shared.position
        first = state.first if lengths is None else n_tokens - lengths
        positions = position + jnp.arange(n_tokens, dtype=jnp.int32) - first[:, None]
        q, keys, values = self._project(x, is_real(lengths, n_tokens))
        places = aft.Places(positions, jnp.zeros_like(positions))
        sums, memory = self._continue(state.memory, keys, values, places, position)
        return AFTState(Shared(position + n_tokens), first, memory), self._output(q, sums)

    def step(self, state: AFTState, x: jax.Array) -> tuple[AFTState, jax.Array]:
        """The next token x [B, D]."""
        state, y = self.prefill(state, x[:, None])
        return state, y[:, 0]

    def _project(self, x: jax.Array, real: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [B, T, D], keys [B, T, H, c], values [B, T, H, d]."""
        z = self.qkv_proj(x)
        q, *rest = jnp.split(z, [self.d_model, self.d_model + self.key_width], axis=-1)
        dtype = sums_dtype(z.dtype)
        keys, values = (a.astype(dtype).reshape(*x.shape[:2], self.n_heads, -1) for a in rest)
        if real is not None:
            keys = jnp.where(real[..., None, None], keys, aft.EMPTY)
        return q, keys, values

    def _output(self, q: jax.Array, sums: aft.Sums) -> jax.Array:
        return self.out_proj(self._gated(q, sums).astype(q.dtype))

    def _gated(self, q: jax.Array, sums: aft.Sums) -> jax.Array:
        """sigmoid(q) times the weighted mean, [B, T, D]."""
        mean = aft.mean(sums).reshape(q.shape)
        return nn.sigmoid(q.astype(mean.dtype)) * mean

    def _parallel(self, keys: jax.Array, values: jax.Array, places: aft.Places) -> aft.Sums:
        """Sums of each token of whole rows."""
        memory = self._empty(jnp.full_like(keys, aft.EMPTY), jnp.zeros_like(values))
        return self._continue(memory, keys, values, places, jnp.zeros((), jnp.int32))[0]


class AFTSimple(AFT):
    """AFT-simple: w = 0. The state is the running sums, constant in the length.

    Attributes:
      d_model: D.
      max_len: longest sequence.
      config: see `AFTSimpleConfig`.
      n_layers: depth of the residual stack; initialisers of the output projection may depend on it.
      dtype: of the activations; None follows the input. Sums and states stay in float32.
      sequence_axis: mesh axis over which L is sharded in `__call__`, or None.

    Parameters:
      qkv_proj/kernel [D, 3*D]: columns are queries, keys, values, D each.
      qkv_proj/bias [3*D]: likewise.
      out_proj/kernel [D, D]
      out_proj/bias [D]
    """

    config: AFTSimpleConfig = AFTSimpleConfig()
    sequence_axis: str | None = None

    @staticmethod
    def is_unbounded(config: AFTSimpleConfig) -> bool:
        """Decoding may continue beyond max_len: the state does not grow."""
        return True

    def _parallel(self, keys: jax.Array, values: jax.Array, places: aft.Places) -> aft.Sums:
        in_axes = ("BL1D", "BL1D", "1L" if len(places.document) == 1 else "BL")
        running_sums = sharded(sequence_parallel.aft_simple, self.sequence_axis, in_axes, "BL1D")
        return running_sums(keys, values, places.document)

    def _empty(self, keys: jax.Array, values: jax.Array) -> aft.Sums:
        return aft.no_sums(keys, values)

    def _continue(
        self, memory: aft.Sums, keys: jax.Array, values: jax.Array, places: aft.Places, position: jax.Array
    ) -> tuple[aft.Sums, aft.Sums]:
        sums = aft.running_sums(keys, values, memory, places.document)
        return sums, jax.tree.map(lambda x: x[:, -1:], sums)


class AFTFull(AFT):
    """AFT-full: w_{t,s} = u_t . v_s. The state is a cache of all keys and values.

    Attributes:
      d_model: D.
      max_len: Lmax, longest sequence.
      config: see `AFTFullConfig`.
      n_layers: depth of the residual stack; initialisers of the output projection may depend on it.
      dtype: of the activations; None follows the input. Sums and states stay in float32.

    Parameters:
      qkv_proj/kernel [D, 3*D]: columns are queries, keys, values, D each.
      qkv_proj/bias [3*D]: likewise.
      position_queries [Lmax, R]: u, by the position of the query.
      position_keys [Lmax, R]: v, by the position of the key.
      out_proj/kernel [D, D]
      out_proj/bias [D]
    """

    config: AFTFullConfig = AFTFullConfig()

    def setup(self) -> None:
        super().setup()
        shape = (self.max_len, self.config.rank)
        self.position_queries = self.param("position_queries", position_init, shape, jnp.float32)
        self.position_keys = self.param("position_keys", position_init, shape, jnp.float32)

    def _empty(self, keys: jax.Array, values: jax.Array) -> Cache:
        return Cache(keys, values)

    def _parallel(self, keys: jax.Array, values: jax.Array, places: aft.Places) -> aft.Sums:
        return self._sums(keys, values, places, places, jnp.zeros((), jnp.int32))

    def _continue(
        self, memory: Cache, keys: jax.Array, values: jax.Array, places: aft.Places, position: jax.Array
    ) -> tuple[aft.Sums, Cache]:
        room = memory.keys.shape[1]
        require(keys.shape[1] <= room, "sequence length", keys.shape[1], f"in 1..max_len={room}")
        memory = Cache(
            jax.lax.dynamic_update_slice_in_dim(memory.keys, keys, position, axis=1),
            jax.lax.dynamic_update_slice_in_dim(memory.values, values, position, axis=1),
        )
        positions = places.position[:, :1] - position + jnp.arange(room, dtype=jnp.int32)
        cached = aft.Places(positions, jnp.zeros_like(positions))
        sums = self._sums(memory.keys, memory.values, places, cached, position)
        weighted = within(sums.weighted, position + keys.shape[1], room)
        return sums._replace(weighted=weighted), memory

    def _sums(
        self,
        keys: jax.Array,
        values: jax.Array,
        queries: aft.Places,
        seen: aft.Places,
        own: jax.Array,
    ) -> aft.Sums:
        bias = aft.low_rank_bias(self.position_queries, self.position_keys)
        return full_sums(keys, values, bias, queries, seen, own)


class WindowedAFT(AFT):
    """Position biases on the last K tokens; the state is the last K - 1 keys and values, and earlier sums."""

    def _empty(self, keys: jax.Array, values: jax.Array) -> LastKeys:
        def last(x: jax.Array, fill: float) -> jax.Array:
            return jnp.full_like(x, fill, shape=(x.shape[0], self.window - 1, *x.shape[2:]))

        return LastKeys(last(keys, aft.EMPTY), last(values, 0), aft.no_sums(keys, values))

    def _continue(
        self, memory: LastKeys, keys: jax.Array, values: jax.Array, places: aft.Places, position: jax.Array
    ) -> tuple[aft.Sums, LastKeys]:
        kept = self.window - 1
        keys = jnp.concatenate([memory.keys, keys], axis=1)
        values = jnp.concatenate([memory.values, values], axis=1)
        earlier = places.position[:, :1] + jnp.arange(-kept, 0, dtype=jnp.int32)
        seen = aft.Places(
            jnp.concatenate([earlier, places.position], axis=1),
            jnp.pad(places.document, [(0, 0), (kept, 0)], mode="edge"),
        )
        sums, before = window_sums(keys, values, self.bias(), memory.before, seen, self.window)
        start = keys.shape[1] - kept
        return sums, LastKeys(keys[:, start:], values[:, start:], before)


class AFTLocal(WindowedAFT):
    """AFT-local: w_{t,s} = u_t . v_s where t - s < window, and 0, not minus infinity, beyond.

    Attributes:
      d_model: D.
      max_len: Lmax, longest sequence.
      config: see `AFTLocalConfig`.
      n_layers: depth of the residual stack; initialisers of the output projection may depend on it.
      dtype: of the activations; None follows the input. Sums and states stay in float32.

    Parameters:
      qkv_proj/kernel [D, 3*D]: columns are queries, keys, values, D each.
      qkv_proj/bias [3*D]: likewise.
      position_queries [Lmax, R]: u, by the position of the query.
      position_keys [Lmax, R]: v, by the position of the key.
      out_proj/kernel [D, D]
      out_proj/bias [D]
    """

    config: AFTLocalConfig = AFTLocalConfig()

    def setup(self) -> None:
        super().setup()
        shape = (self.max_len, self.config.rank)
        self.position_queries = self.param("position_queries", position_init, shape, jnp.float32)
        self.position_keys = self.param("position_keys", position_init, shape, jnp.float32)

    @property
    def window(self) -> int:
        """K; no lag is longer than the sequence."""
        return min(self.config.window, self.max_len)

    def bias(self) -> aft.Bias:
        """w."""
        return aft.low_rank_bias(self.position_queries, self.position_keys, self.window)


class AFTConv(WindowedAFT):
    """AFT-conv: one key per head, and w^h_{t,s} = tap t - s of head h, 0 beyond the last of K taps.

    The taps are the parameters, standardised over K, times gamma, plus beta; gamma and beta start as 0.

    Attributes:
      d_model: D.
      max_len: longest sequence.
      config: see `AFTConvConfig`.
      n_layers: depth of the residual stack; initialisers of the output projection may depend on it.
      dtype: of the activations; None follows the input. Sums and states stay in float32.

    Parameters:
      qkv_proj/kernel [D, 2*D + H]: columns are queries, D, one key per head, H, and values, D.
      qkv_proj/bias [2*D + H]: likewise.
      position_taps [H, K]: tap 0 meets the current token.
      position_scale [H]: gamma.
      position_bias [H]: beta.
      out_proj/kernel [D, D]
      out_proj/bias [D]
    """

    config: AFTConvConfig = AFTConvConfig()

    @staticmethod
    def is_unbounded(config: AFTConvConfig) -> bool:
        """Decoding may continue beyond max_len: the state does not grow."""
        return True

    def setup(self) -> None:
        super().setup()
        self.position_taps = self.param(
            "position_taps", position_init, (self.n_heads, self.window), jnp.float32
        )
        self.position_scale = self.param(
            "position_scale", nn.initializers.zeros, (self.n_heads,), jnp.float32
        )
        self.position_bias = self.param("position_bias", nn.initializers.zeros, (self.n_heads,), jnp.float32)

    @property
    def n_heads(self) -> int:
        """H."""
        return self.config.n_heads

    @property
    def key_width(self) -> int:
        """H, with one channel each."""
        return self.config.n_heads

    @property
    def window(self) -> int:
        """K."""
        return self.config.n_taps

    def bias(self) -> aft.Bias:
        """w."""
        taps = aft.standardize_taps(self.position_taps, self.position_scale, self.position_bias)
        return aft.tap_bias(taps)
