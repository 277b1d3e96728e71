"""Fastmax: attention with a polynomial kernel.

Axes: B batch, L length, T new tokens, D channels, H heads, d head_dim, M features."""

from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import FastmaxConfig, require
from hyena_jax.initializers import initializers
from hyena_jax.mixers.inputs import (
    Shared,
    check_causal,
    check_input,
    check_next,
    check_state_length,
    is_real,
    sums_dtype,
)
from hyena_jax.mixers.mixing import Mixing
from hyena_jax.ops import fastmax, sequence_parallel
from hyena_jax.ops.attention import same_segment
from hyena_jax.ops.documents import documents
from hyena_jax.ops.sequence_shards import sharded


class FastmaxState(NamedTuple):
    """Sums over all keys so far of features ⊗ (values, 1) [B, H, M, d+1], float32."""

    shared: Shared
    sums: jax.Array


class Fastmax(nn.Module):
    """Attention with a polynomial kernel (Gerami et al. 2024, arXiv 2402.07901).

    o_t = sum_s f(scale q_t . k_s) v_s / sum_s f(scale q_t . k_s), f(x) = sum_{l=0..p} x^l / l!, with queries
    and keys standardised over the channels of their head. Decoding costs O(M d) per token and head,
    M = C(d+p, p), at any length, and gives the same values for both forms, `factorized` or not.

    With segment_ids the quadratic form is used, O(L^2): sums over keys cannot tell documents apart.

    Attributes:
      d_model: D.
      max_len: longest sequence.
      config: see `FastmaxConfig`.
      n_layers: depth of the residual stack; initialisers of the output projection may depend on it.
      dtype: of the activations; None follows the input. Kernel, sums and states stay in float32.
      sequence_axis: mesh axis over which L is sharded in `__call__`, or None.

    Parameters:
      qkv_proj/kernel [D, 3*D]: columns are queries, keys, values, D each, head after head.
      qkv_proj/bias [3*D]: with qkv_bias.
      out_proj/kernel [D, D]: the output projection.
      out_proj/bias [D]: likewise.
    """

    d_model: int
    max_len: int
    config: FastmaxConfig = FastmaxConfig()
    n_layers: int = 1
    dtype: jnp.dtype | None = None
    sequence_axis: str | None = None

    @staticmethod
    def is_unbounded(config: FastmaxConfig) -> bool:
        """Decoding may continue beyond max_len: the state does not grow."""
        return True

    def setup(self) -> None:
        config = self.config
        config.check(self.d_model, self.max_len)
        init = initializers(config.init, self.n_layers, self.d_model, self.d_model)
        self.qkv_proj = nn.Dense(
            3 * self.d_model,
            use_bias=config.qkv_bias,
            dtype=self.dtype,
            kernel_init=init.kernel,
            bias_init=init.bias,
        )
        self.out_proj = nn.Dense(
            self.d_model,
            use_bias=config.out_bias,
            dtype=self.dtype,
            kernel_init=init.out_kernel,
            bias_init=init.out_bias,
        )

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D]; each run of equal segment_ids [B, L] is a document.

        Raises:
          ValueError: for a wrong rank, width or length of x.
        """
        check_input(x, self.d_model, self.max_len, segment_ids)
        config, axis, (q, k, v) = self.config, self.sequence_axis, self._qkv(x)
        if config.factorized and segment_ids is None:
            if config.causal:
                attend = partial(sequence_parallel.fastmax_causal, p=config.p)
            else:
                attend = partial(sequence_parallel.fastmax_bidirectional, p=config.p)
            return self._output(sharded(attend, axis, ("BLHd",) * 3, "BLHd")(q, k, v), x)
        require(axis is None or config.factorized, "factorized", False, "True with a sequence_axis")
        given = None if segment_ids is None else segment_ids.shape
        require(axis is None, "segment_ids", given, "None with a sequence_axis")
        mask = jnp.ones((x.shape[1], x.shape[1]), bool)
        if config.causal:
            mask = jnp.tril(mask)
        if segment_ids is not None:
            mask = mask & same_segment(documents(segment_ids).number)
        return self._output(fastmax.fastmax_quadratic(q, k, v, config.p, mask), x)

    def mixing_matrix(self, x: jax.Array) -> Mixing:
        """The weights of each head, divided by their sum, from v to the output projection."""
        q, k, v = self._qkv(x)
        weights = fastmax.kernel(jnp.einsum("bthd,bshd->bhts", q, k), self.config.p)
        if self.config.causal:
            weights = jnp.tril(weights)
        return Mixing(weights / fastmax.guarded(weights.sum(-1, keepdims=True)), v)

    def init_state(self, batch_size: int, max_len: int) -> FastmaxState:
        """The state before the first token of a sequence of at most `max_len` tokens.

        Raises:
          ValueError: if the mixer is not causal, or max_len is above its own.
        """
        check_causal(self.config)
        check_state_length(max_len, self.max_len)
        n_heads = self.config.n_heads
        dtype = sums_dtype(self.qkv_proj.variables["params"]["kernel"].dtype)
        keys = jnp.zeros((batch_size, 0, n_heads, self.d_model // n_heads), dtype)
        return FastmaxState(Shared(jnp.zeros((), jnp.int32)), fastmax.no_sums(keys, self.config.p))

    def prefill(
        self, state: FastmaxState, x: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[FastmaxState, jax.Array]:
        """The next T tokens x [B, T, D] at once."""
        lengths = check_next(x, self.d_model, self.max_len, len(state.sums), lengths)
        real = is_real(lengths, x.shape[1])
        o, sums = fastmax.fastmax_causal(*self._qkv(x), self.config.p, state.sums, real)
        return FastmaxState(Shared(state.shared.position + x.shape[1]), sums), self._output(o, x)

    def step(self, state: FastmaxState, x: jax.Array) -> tuple[FastmaxState, jax.Array]:
        """The next token x [B, D]: O(M d) per head."""
        state, y = self.prefill(state, x[:, None])
        return state, y[:, 0]

    def _qkv(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries and keys, with sqrt(scale) in each, and values, [B, T, H, d]."""
        config = self.config
        heads = self.qkv_proj(x).reshape(*x.shape[:2], 3, config.n_heads, -1)
        heads = heads.astype(sums_dtype(heads.dtype))
        q, k, v = (heads[:, :, i] for i in range(3))
        if config.standardize:
            q, k = fastmax.standardize(q), fastmax.standardize(k)
        scale = q.shape[-1] ** -0.5 if config.scale is None else config.scale
        return q * scale**0.5, k * scale**0.5, v

    def _output(self, o: jax.Array, x: jax.Array) -> jax.Array:
        return self.out_proj(o.reshape(x.shape).astype(self.dtype or x.dtype))
