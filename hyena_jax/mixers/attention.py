"""Softmax multi-head attention, the baseline. Axes: B batch, L length, T new tokens, D channels, H heads."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import AttentionConfig, require
from hyena_jax.mixers.inputs import check_input, check_state_length
from hyena_jax.ops.attention import same_segment, softmax_attention, visible_until


class Shared(NamedTuple):
    """What the batch has in common: tokens seen []."""

    position: jax.Array


class AttentionState(NamedTuple):
    """Keys and values [B, max_len, H, D/H], and the first real position of each row [B]."""

    shared: Shared
    keys: jax.Array
    values: jax.Array
    first: jax.Array


class Attention(nn.Module):
    """Causal multi-head attention with biases, no positions of its own (Vaswani et al. 2017, section 3.2).

    Attributes:
      d_model: D.
      max_len: longest sequence.
      config: see `AttentionConfig`.
      n_layers: depth of the residual stack; scales the initial output projection by 1/sqrt(2 n_layers).
      dtype: of the activations; None follows the input. The softmax stays in float32.
    """

    d_model: int
    max_len: int
    config: AttentionConfig = AttentionConfig()
    n_layers: int = 1
    dtype: jnp.dtype | None = None

    def setup(self) -> None:
        n_heads = self.config.n_heads
        require(self.d_model % n_heads == 0, "n_heads", n_heads, f"a divisor of d_model={self.d_model}")
        self.qkv_proj = nn.Dense(3 * self.d_model, dtype=self.dtype, kernel_init=nn.initializers.normal(0.02))
        self.out_proj = nn.Dense(
            self.d_model,
            dtype=self.dtype,
            kernel_init=nn.initializers.normal(0.02 / (2 * self.n_layers) ** 0.5),
        )

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D]; a query sees earlier keys of its own segment.

        Raises:
          ValueError: for a wrong rank, width or length of x.
        """
        check_input(x, self.d_model, self.max_len)
        mask = None if segment_ids is None else same_segment(segment_ids)
        return self._output(softmax_attention(*self._qkv(x), mask, is_causal=True))

    def init_state(self, batch_size: int, max_len: int) -> AttentionState:
        """The state before the first token of a sequence of at most `max_len` tokens."""
        check_state_length(max_len, self.max_len)
        n_heads = self.config.n_heads
        dtype = self.dtype or self.qkv_proj.variables["params"]["kernel"].dtype
        empty = jnp.zeros((batch_size, max_len, n_heads, self.d_model // n_heads), dtype)
        return AttentionState(
            Shared(jnp.zeros((), jnp.int32)), empty, empty, jnp.zeros(batch_size, jnp.int32)
        )

    def prefill(
        self, state: AttentionState, x: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[AttentionState, jax.Array]:
        """The next T tokens x [B, T, D] at once."""
        check_input(x, self.d_model, state.keys.shape[1])
        position = state.shared.position
        q, k, v = self._qkv(x)
        keys = jax.lax.dynamic_update_slice_in_dim(state.keys, k.astype(state.keys.dtype), position, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(
            state.values, v.astype(state.values.dtype), position, axis=1
        )
        first = state.first if lengths is None else x.shape[1] - lengths
        mask = visible_until(position, x.shape[1], keys.shape[1], first)
        y = self._output(softmax_attention(q, keys, values, mask))
        return AttentionState(Shared(position + x.shape[1]), keys, values, first), y

    def step(self, state: AttentionState, x: jax.Array) -> tuple[AttentionState, jax.Array]:
        """The next token x [B, D], against the cache: O(max_len)."""
        state, y = self.prefill(state, x[:, None])
        return state, y[:, 0]

    def _qkv(self, x: jax.Array) -> list[jax.Array]:
        heads = self.qkv_proj(x).reshape(*x.shape[:2], 3, self.config.n_heads, -1)
        return [heads[:, :, i] for i in range(3)]

    def _output(self, o: jax.Array) -> jax.Array:
        return self.out_proj(o.reshape(*o.shape[:2], self.d_model))
