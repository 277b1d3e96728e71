"""Softmax attention in a window.

Axes: B batch, L length, T new tokens, D channels, H heads, G heads of keys and values, d head_dim, R keys
remembered.
"""

from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import LocalAttentionConfig
from hyena_jax.mixers.attention import QKV_AXES, empty_cache, heads, projections
from hyena_jax.mixers.inputs import (
    Shared,
    check_input,
    check_next,
    check_state_length,
    check_token,
    documents,
)
from hyena_jax.ops import sequence_parallel
from hyena_jax.ops.attention import local_attention, softmax_attention
from hyena_jax.ops.sequence_shards import sharded


class LocalAttentionState(NamedTuple):
    """The last R keys, turned by their positions, and values [B, R, G, d]; first real position of rows [B].

    What came at position t lies in slot t % R.
    """

    shared: Shared
    keys: jax.Array
    values: jax.Array
    first: jax.Array


class LocalAttention(nn.Module):
    """Attention to the last `window` keys and the current one (Griffin: arXiv 2402.19427, section 2.3).

    Attributes:
      d_model: D.
      max_len: longest sequence; the state holds R = min(window + 1, max_len) keys.
      config: see `LocalAttentionConfig`.
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
    config: LocalAttentionConfig = LocalAttentionConfig()
    n_layers: int = 1
    dtype: jnp.dtype | None = None
    sequence_axis: str | None = None

    @staticmethod
    def is_unbounded(config: LocalAttentionConfig) -> bool:
        """Decoding may continue beyond max_len: the state does not grow."""
        return True

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
        if segment_ids is not None:
            segment_ids = documents(segment_ids)
        q, k, v = heads(self.qkv_proj(x), self.config, jnp.zeros((), jnp.int32))
        attend = partial(sequence_parallel.local_attention, window=self.config.window)
        return self._output(sharded(attend, self.sequence_axis, QKV_AXES, "BLHd")(q, k, v, segment_ids))

    def init_state(self, batch_size: int, max_len: int) -> LocalAttentionState:
        """The state before the first token of a sequence of at most `max_len` tokens."""
        check_state_length(max_len, self.max_len)
        n_slots = min(self.config.window + 1, max_len)
        empty = empty_cache(self.config, self.qkv_proj, (batch_size, n_slots))
        first = jnp.zeros(batch_size, jnp.int32)
        return LocalAttentionState(Shared(jnp.zeros((), jnp.int32)), empty, empty, first)

    def prefill(
        self, state: LocalAttentionState, x: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[LocalAttentionState, jax.Array]:
        """The next T tokens x [B, T, D] at once, in O(T window)."""
        check_next(x, self.d_model, self.max_len, len(state.first), lengths)
        position, n_tokens = state.shared.position, x.shape[1]
        first = state.first if lengths is None else n_tokens - lengths
        q, k, v = heads(self.qkv_proj(x), self.config, position)
        keys, values = (
            jnp.concatenate([_in_order(ring, position), new.astype(ring.dtype)], axis=1)
            for ring, new in ((state.keys, k), (state.values, v))
        )
        n_slots = state.keys.shape[1]
        positions = position - n_slots + jnp.arange(keys.shape[1], dtype=jnp.int32)
        # Nobody sees the oldest slot: it is window + 1 before the first query, or still empty.
        y = local_attention(
            q, keys[:, 1:], values[:, 1:], self.config.window, positions[1:] >= first[:, None]
        )
        rings = (_in_slots(z[:, -n_slots:], position + n_tokens) for z in (keys, values))
        return LocalAttentionState(Shared(position + n_tokens), *rings, first), self._output(y)

    def step(self, state: LocalAttentionState, x: jax.Array) -> tuple[LocalAttentionState, jax.Array]:
        """The next token x [B, D]: overwrites the oldest key and attends to the ring, O(window)."""
        check_token(x, self.d_model, len(state.first))
        position, n_slots = state.shared.position, state.keys.shape[1]
        q, k, v = heads(self.qkv_proj(x[:, None]), self.config, position)
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(ring, new.astype(ring.dtype), position % n_slots, axis=1)
            for ring, new in ((state.keys, k), (state.values, v))
        )
        age = (position - jnp.arange(n_slots, dtype=jnp.int32)) % n_slots
        real = position - age >= state.first[:, None]
        y = self._output(softmax_attention(q, keys, values, real=real))
        return LocalAttentionState(Shared(position + 1), keys, values, state.first), y[:, 0]

    def _output(self, o: jax.Array) -> jax.Array:
        return self.out_proj(o.reshape(*o.shape[:2], self.d_model))


def _in_order(ring: jax.Array, position: jax.Array) -> jax.Array:
    """What the ring [B, R, ...] holds before `position`, oldest first."""
    return jnp.roll(ring, -position % ring.shape[1], axis=1)


def _in_slots(last: jax.Array, position: jax.Array) -> jax.Array:
    """The ring [B, R, ...] of what came last before `position`, given oldest first."""
    return jnp.roll(last, position % last.shape[1], axis=1)
