"""Softmax multi-head attention.

Axes: B batch, L length, T new tokens, D channels, H heads, G heads of keys and values, d head_dim.
"""

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
    documents,
)
from hyena_jax.ops import sequence_parallel
from hyena_jax.ops.attention import rotary, softmax_attention
from hyena_jax.ops.sequence_shards import sharded

# Queries, keys, values and segment_ids, see `sequence_shards.over_shards`.
QKV_AXES = ("BLHd", "BLGd", "BLGd", "BL")


class AttentionState(NamedTuple):
    """Keys, turned by their positions, and values [B, max_len, G, d]; first real position of a row [B]."""

    shared: Shared
    keys: jax.Array
    values: jax.Array
    first: jax.Array


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2), causal or not.

    Keys and values can be shared by groups of heads (Ainslie et al. 2023, arXiv 2305.13245) or by all of them
    (Shazeer 2019, arXiv 1911.02150). Positions are none of its own, or rotary.

    Attributes:
      d_model: D.
      max_len: longest sequence.
      config: see `AttentionConfig`.
      n_layers: depth of the residual stack; scales the initial output projection.
      dtype: of the activations; None follows the input. The softmax stays in float32.
      sequence_axis: mesh axis over which L is sharded in `__call__`, or None.

    Parameters:
      qkv_proj/kernel [D, (H + 2*G)*d]: columns are the H queries, the G keys, the G values, d each.
      qkv_proj/bias [(H + 2*G)*d]: with qkv_bias.
      out_proj/kernel [D, D]
      out_proj/bias [D]: with out_bias.
    """

    d_model: int
    max_len: int
    config: AttentionConfig = AttentionConfig()
    n_layers: int = 1
    dtype: jnp.dtype | None = None
    sequence_axis: str | None = None

    def setup(self) -> None:
        self.config.check(self.d_model, self.max_len)
        self.qkv_proj, self.out_proj = projections(self.config, self.d_model, self.n_layers, self.dtype)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D]; each run of equal segment_ids [B, L] is a document.

        Raises:
          ValueError: for a wrong rank, width or length of x.
        """
        check_input(x, self.d_model, self.max_len, segment_ids)
        q, k, v = heads(self.qkv_proj(x), self.config, jnp.zeros((), jnp.int32))
        segment_ids = None if segment_ids is None else documents(segment_ids)
        attend = partial(sequence_parallel.softmax_attention, is_causal=self.config.causal)
        return self._output(sharded(attend, self.sequence_axis, QKV_AXES, "BLHd")(q, k, v, segment_ids))

    def init_state(self, batch_size: int, max_len: int) -> AttentionState:
        """The state before the first token of a sequence of at most `max_len` tokens."""
        check_causal(self.config)
        check_state_length(max_len, self.max_len)
        empty = empty_cache(self.config, self.qkv_proj, (batch_size, max_len))
        first = jnp.zeros(batch_size, jnp.int32)
        return AttentionState(Shared(jnp.zeros((), jnp.int32)), empty, empty, first)

    def prefill(
        self, state: AttentionState, x: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[AttentionState, jax.Array]:
        """The next T tokens x [B, T, D] at once."""
        check_next(x, self.d_model, state.keys.shape[1], len(state.first), lengths)
        position, n_tokens = state.shared.position, x.shape[1]
        q, k, v = heads(self.qkv_proj(x), self.config, position)
        keys = jax.lax.dynamic_update_slice_in_dim(state.keys, k.astype(state.keys.dtype), position, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(
            state.values, v.astype(state.values.dtype), position, axis=1
        )
        first = state.first if lengths is None else n_tokens - lengths
        real = jnp.arange(keys.shape[1], dtype=jnp.int32) >= first[:, None]
        y = self._output(softmax_attention(q, keys, values, True, position, real))
        return AttentionState(Shared(position + n_tokens), keys, values, first), y

    def step(self, state: AttentionState, x: jax.Array) -> tuple[AttentionState, jax.Array]:
        """The next token x [B, D], against the cache: O(max_len)."""
        state, y = self.prefill(state, x[:, None])
        return state, y[:, 0]

    def _output(self, o: jax.Array) -> jax.Array:
        return self.out_proj(o.reshape(*o.shape[:2], self.d_model))


def projections(
    config: AttentionConfig | LocalAttentionConfig, d_model: int, n_layers: int, dtype: jnp.dtype | None
) -> tuple[nn.Dense, nn.Dense]:
    """The dense layers before and after the heads: D -> (H + 2 G) d and D -> D."""
    init = initializers(config.init, n_layers, d_model, d_model)
    n_kv_heads = config.n_kv_heads or config.n_heads
    width = (config.n_heads + 2 * n_kv_heads) * d_model // config.n_heads
    qkv = nn.Dense(width, use_bias=config.qkv_bias, dtype=dtype, kernel_init=init.kernel, bias_init=init.bias)
    out = nn.Dense(
        d_model, use_bias=config.out_bias, dtype=dtype, kernel_init=init.out_kernel, bias_init=init.out_bias
    )
    return qkv, out


def heads(
    qkv: jax.Array, config: AttentionConfig | LocalAttentionConfig, position: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [B, T, H, d], k and v [B, T, G, d] of the first projection's output [B, T, (H + 2 G) d].

    The first token is at `position` []. Padding counts: only differences of positions matter.
    """
    n_heads, n_kv_heads = config.n_heads, config.n_kv_heads or config.n_heads
    qkv = qkv.reshape(*qkv.shape[:2], n_heads + 2 * n_kv_heads, -1)
    q, k, v = jnp.split(qkv, [n_heads, n_heads + n_kv_heads], axis=2)
    n_turned = round(config.rotary_fraction * q.shape[-1])
    if n_turned:
        positions = position + jnp.arange(q.shape[1], dtype=jnp.int32)
        q, k = (rotary(z, positions, n_turned, config.rotary_base) for z in (q, k))
    return q, k, v


def empty_cache(
    config: AttentionConfig | LocalAttentionConfig, qkv_proj: nn.Dense, shape: tuple[int, int]
) -> jax.Array:
    """Keys or values before the first token, [*shape, G, d] in the dtype of the bound layer's output."""
    kernel = qkv_proj.variables["params"]["kernel"]
    n_kv_heads = config.n_kv_heads or config.n_heads
    head_dim = kernel.shape[0] // config.n_heads
    return jnp.zeros((*shape, n_kv_heads, head_dim), qkv_proj.dtype or kernel.dtype)
