"""Softmax multi-head attention: to all keys, or to the keys in a window.

Axes: B batch, L length, T new tokens, D channels, H heads, G heads of keys and values, d head_dim, S keys in
the state.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import AttentionConfig, LocalAttentionConfig
from hyena_jax.initializers import initializers
from hyena_jax.mixers.inputs import (
    Shared,
    check_causal,
    check_input,
    check_next,
    check_state_length,
    check_token,
    within,
)
from hyena_jax.mixers.mixing import Mixing
from hyena_jax.mixers.norms import RMSNorm
from hyena_jax.ops import sequence_parallel
from hyena_jax.ops.attention import default_method, local_attention, rotary, softmax_attention
from hyena_jax.ops.documents import documents
from hyena_jax.ops.sequence_shards import sharded

# Of queries, keys, values and segment_ids, as `sharded` reads them.
QKV_AXES = ("BLHd", "BLGd", "BLGd", "BL")


class AttentionState(NamedTuple):
    """The keys, rotated by their positions, and the values [B, S, G, d]; first real position of each row [B].

    `Attention` keeps all S = max_len keys by position; `LocalAttention` the last S, position t in slot t % S.
    """

    shared: Shared
    keys: jax.Array
    values: jax.Array
    first: jax.Array


class HeadsAttention(nn.Module):
    """What both forms of attention share: dense layers, norms, rotary positions, and the parallel form."""

    d_model: int
    max_len: int
    config: AttentionConfig | LocalAttentionConfig
    n_layers: int = 1
    dtype: jnp.dtype | None = None
    sequence_axis: str | None = None
    platform: str | None = None

    def setup(self) -> None:
        config, d_model = self.config, self.d_model
        config.check(d_model, self.max_len)
        init = initializers(config.init, self.n_layers, d_model, d_model)
        width = (config.n_heads + 2 * self.n_kv_heads) * d_model // config.n_heads
        self.qkv_proj = nn.Dense(
            width,
            use_bias=config.qkv_bias,
            dtype=self.dtype,
            kernel_init=init.kernel,
            bias_init=init.bias,
        )
        if config.qk_norm_eps is not None:
            self.q_norm = RMSNorm(config.qk_norm_eps, self.dtype)
            self.k_norm = RMSNorm(config.qk_norm_eps, self.dtype)
        self.out_proj = nn.Dense(
            d_model,
            use_bias=config.out_bias,
            dtype=self.dtype,
            kernel_init=init.out_kernel,
            bias_init=init.out_bias,
        )

    @property
    def n_kv_heads(self) -> int:
        """G."""
        return self.config.n_kv_heads or self.config.n_heads

    def attend(self) -> Callable[..., jax.Array]:
        """The function (q, k, v, segment_ids, axis_name) -> o [B, L, H, d] of `ops.sequence_parallel`."""
        raise NotImplementedError

    def sees(self, lag: jax.Array) -> jax.Array:
        """Whether a query sees the key that is `lag` positions before it."""
        raise NotImplementedError

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D]; each run of equal segment_ids [B, L] is a document.

        Raises:
          ValueError: for a wrong rank, width or length of x.
        """
        check_input(x, self.d_model, self.max_len, segment_ids)
        q, k, v = self._heads(x, jnp.zeros((), jnp.int32))
        segment_ids = None if segment_ids is None else documents(segment_ids).number
        attend = partial(self.attend(), method=default_method(self.platform))
        attend = sharded(attend, self.sequence_axis, QKV_AXES, "BLHd")
        return self._output(attend(q, k, v, segment_ids))

    def mixing_matrix(self, x: jax.Array) -> Mixing:
        """The softmax weights of each head, from v to the output projection."""
        q, k, v = self._heads(x, jnp.zeros((), jnp.int32))
        k, v = (jnp.repeat(z, q.shape[2] // k.shape[2], axis=2) for z in (k, v))
        dtype = jnp.promote_types(q.dtype, jnp.float32)
        logits = jnp.einsum("bthd,bshd->bhts", q.astype(dtype), k.astype(dtype)) / q.shape[-1] ** 0.5
        lag = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])
        logits = jnp.where(self.sees(lag), logits, -jnp.inf)
        return Mixing(jax.nn.softmax(logits, axis=-1), v)

    def _heads(self, x: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [B, T, H, d], k and v [B, T, G, d] of x [B, T, D], whose first token is at `position` [].

        Padding counts as positions: only differences of positions matter.
        """
        config, n_heads = self.config, self.config.n_heads
        qkv = self.qkv_proj(x).reshape(*x.shape[:2], n_heads + 2 * self.n_kv_heads, -1)
        q, k, v = jnp.split(qkv, [n_heads, n_heads + self.n_kv_heads], axis=2)
        if config.qk_norm_eps is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        n_rotated = round(config.rotary_fraction * q.shape[-1])
        if n_rotated:
            positions = position + jnp.arange(q.shape[1], dtype=jnp.int32)
            q, k = (
                rotary(z, positions, n_rotated, config.rotary_base, config.rotary_scaling) for z in (q, k)
            )
        return q, k, v

    def _output(self, o: jax.Array) -> jax.Array:
        return self.out_proj(o.reshape(*o.shape[:2], self.d_model))

    def _empty_state(self, batch_size: int, n_keys: int) -> AttentionState:
        """The state before the first token; keys and values have the dtype of the bound layer's output."""
        dtype = self.dtype or self.qkv_proj.variables["params"]["kernel"].dtype
        shape = (batch_size, n_keys, self.n_kv_heads, self.d_model // self.config.n_heads)
        empty, first = jnp.zeros(shape, dtype), jnp.zeros(batch_size, jnp.int32)
        return AttentionState(Shared(jnp.zeros((), jnp.int32)), empty, empty, first)


class Attention(HeadsAttention):
    """Multi-head attention (Vaswani et al. 2017, section 3.2), causal or not.

    Groups of heads can share keys and values (Ainslie et al. 2023, arXiv 2305.13245), or all heads can
    (Shazeer 2019, arXiv 1911.02150). Positions are rotary, or absent.

    Attributes:
      d_model: D.
      max_len: longest sequence.
      config: see `AttentionConfig`.
      n_layers: depth of the residual stack; scales the initial output projection.
      dtype: of the activations; None follows the input. The softmax stays in float32.
      sequence_axis: mesh axis over which L is sharded in `__call__`, or None.
      platform: see `ops.attention.default_method`.

    Parameters:
      qkv_proj/kernel [D, (H + 2*G)*d]: columns are the H queries, the G keys, the G values, d each.
      qkv_proj/bias [(H + 2*G)*d]: with qkv_bias.
      q_norm/scale [d]: with qk_norm_eps, the factor of the queries' norm less 1.
      k_norm/scale [d]: with qk_norm_eps, likewise of the keys.
      out_proj/kernel [D, D]
      out_proj/bias [D]: with out_bias.
    """

    config: AttentionConfig = AttentionConfig()

    def attend(self) -> Callable[..., jax.Array]:
        return partial(sequence_parallel.softmax_attention, is_causal=self.config.causal)

    def sees(self, lag: jax.Array) -> jax.Array:
        return (lag >= 0) | (not self.config.causal)

    def init_state(self, batch_size: int, max_len: int) -> AttentionState:
        """The state before the first token of a sequence of at most `max_len` tokens."""
        check_causal(self.config)
        check_state_length(max_len, self.max_len)
        return self._empty_state(batch_size, max_len)

    def prefill(
        self, state: AttentionState, x: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[AttentionState, jax.Array]:
        """The next T tokens x [B, T, D] at once; NaN where the cache has no room for them."""
        lengths = check_next(x, self.d_model, state.keys.shape[1], len(state.first), lengths)
        position, n_tokens = state.shared.position, x.shape[1]
        q, k, v = self._heads(x, position)
        keys = jax.lax.dynamic_update_slice_in_dim(state.keys, k.astype(state.keys.dtype), position, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(
            state.values, v.astype(state.values.dtype), position, axis=1
        )
        first = state.first if lengths is None else n_tokens - lengths
        real = jnp.arange(keys.shape[1], dtype=jnp.int32) >= first[:, None]
        method = default_method(self.platform)
        y = self._output(softmax_attention(q, keys, values, True, position, real, None, method))
        after = position + n_tokens
        return AttentionState(Shared(after), keys, values, first), within(y, after, keys.shape[1])

    def step(self, state: AttentionState, x: jax.Array) -> tuple[AttentionState, jax.Array]:
        """The next token x [B, D], against the cache: O(max_len)."""
        state, y = self.prefill(state, x[:, None])
        return state, y[:, 0]


class LocalAttention(HeadsAttention):
    """Attention to the last `window` keys and the current one (Griffin: arXiv 2402.19427, section 2.3).

    Attributes:
      d_model: D.
      max_len: longest sequence; the state holds S = min(window + 1, max_len) keys.
      config: see `LocalAttentionConfig`.
      n_layers: depth of the residual stack; scales the initial output projection.
      dtype: of the activations; None follows the input. The softmax stays in float32.
      sequence_axis: mesh axis over which L is sharded in `__call__`, or None.
      platform: see `ops.attention.default_method`.

    Parameters:
      qkv_proj/kernel [D, (H + 2*G)*d]: columns are the H queries, the G keys, the G values, d each.
      qkv_proj/bias [(H + 2*G)*d]: with qkv_bias.
      q_norm/scale [d]: with qk_norm_eps, the factor of the queries' norm less 1.
      k_norm/scale [d]: with qk_norm_eps, likewise of the keys.
      out_proj/kernel [D, D]
      out_proj/bias [D]: with out_bias.
    """

    config: LocalAttentionConfig = LocalAttentionConfig()

    @staticmethod
    def is_unbounded(config: LocalAttentionConfig) -> bool:
        """Decoding may continue beyond max_len: the state does not grow.

        With a window of max_len or more, it then sees the last max_len keys, the most that it was trained on.
        """
        return True

    def attend(self) -> Callable[..., jax.Array]:
        return partial(sequence_parallel.local_attention, window=self.config.window)

    def sees(self, lag: jax.Array) -> jax.Array:
        return (lag >= 0) & (lag <= self.config.window)

    def init_state(self, batch_size: int, max_len: int) -> AttentionState:
        """The state before the first token of a sequence of at most `max_len` tokens."""
        check_state_length(max_len, self.max_len)
        return self._empty_state(batch_size, min(self.config.window + 1, max_len))

    def prefill(
        self, state: AttentionState, x: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[AttentionState, jax.Array]:
        """The next T tokens x [B, T, D] at once, in O(T window)."""
        lengths = check_next(x, self.d_model, self.max_len, len(state.first), lengths)
        position, n_tokens, n_slots = state.shared.position, x.shape[1], state.keys.shape[1]
        first = state.first if lengths is None else n_tokens - lengths
        q, k, v = self._heads(x, position)
        # The slots rotated so that the oldest key comes first, then the new ones.
        keys, values = (
            jnp.concatenate([jnp.roll(ring, -position % n_slots, axis=1), new.astype(ring.dtype)], axis=1)
            for ring, new in ((state.keys, k), (state.values, v))
        )
        positions = position - n_slots + jnp.arange(keys.shape[1], dtype=jnp.int32)
        # No query sees the oldest slot: it is window + 1 before the first query, or still empty.
        real, method = positions[1:] >= first[:, None], default_method(self.platform)
        y = local_attention(q, keys[:, 1:], values[:, 1:], self.config.window, real, None, method)
        after = position + n_tokens
        rings = (jnp.roll(z[:, -n_slots:], after % n_slots, axis=1) for z in (keys, values))
        return AttentionState(Shared(after), *rings, first), self._output(y)

    def step(self, state: AttentionState, x: jax.Array) -> tuple[AttentionState, jax.Array]:
        """The next token x [B, D]: overwrites the oldest key and attends to the ring, O(window)."""
        check_token(x, self.d_model, len(state.first))
        position, n_slots = state.shared.position, state.keys.shape[1]
        q, k, v = self._heads(x[:, None], position)
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(ring, new.astype(ring.dtype), position % n_slots, axis=1)
            for ring, new in ((state.keys, k), (state.values, v))
        )
        age = (position - jnp.arange(n_slots, dtype=jnp.int32)) % n_slots
        real = position - age >= state.first[:, None]
        method = default_method(self.platform)
        y = self._output(softmax_attention(q, keys, values, real=real, method=method))
        return AttentionState(Shared(position + 1), keys, values, state.first), y[:, 0]
