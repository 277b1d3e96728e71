"""The residual block. Axes: B batch, L length, T new tokens, D channels."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import LanguageModelConfig, MixerConfig
from hyena_jax.mixers import mixer_class


class MLP(nn.Module):
    """dense -> GELU (tanh form) -> dense."""

    d_ff: int
    n_layers: int
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """y [..., D] of x [..., D]."""
        hidden = nn.Dense(
            self.d_ff, dtype=self.dtype, kernel_init=nn.initializers.normal(0.02), name="in_proj"
        )(x)
        init = nn.initializers.normal(0.02 / (2 * self.n_layers) ** 0.5)
        return nn.Dense(x.shape[-1], dtype=self.dtype, kernel_init=init, name="out_proj")(nn.gelu(hidden))


class Block(nn.Module):
    """x <- x + mixer(norm(x)), then x <- x + mlp(norm(x)); the state is the mixer's."""

    mixer_config: MixerConfig
    model: LanguageModelConfig
    dtype: jnp.dtype | None = None

    def setup(self) -> None:
        model = self.model
        self.mixer_norm = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)
        self.mixer = mixer_class(self.mixer_config)(
            model.d_model, model.max_len, self.mixer_config, model.n_layers, self.dtype
        )
        self.mlp_norm = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)
        self.mlp = MLP(model.d_ff, model.n_layers, self.dtype)
        self.dropout = nn.Dropout(model.dropout)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D]."""
        y = self.mixer(self.mixer_norm(x), segment_ids, deterministic)
        return self._mlp(x + self.dropout(y, deterministic), deterministic)

    def init_state(self, batch_size: int, max_len: int) -> Any:
        """The mixer's state before the first token."""
        return self.mixer.init_state(batch_size, max_len)

    def prefill(self, state: Any, x: jax.Array, lengths: jax.Array | None = None) -> tuple[Any, jax.Array]:
        """The next T tokens x [B, T, D]."""
        state, y = self.mixer.prefill(state, self.mixer_norm(x), lengths)
        return state, self._mlp(x + y)

    def step(self, state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        """The next token x [B, D]."""
        state, y = self.mixer.step(state, self.mixer_norm(x))
        return state, self._mlp(x + y)

    def _mlp(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        return x + self.dropout(self.mlp(self.mlp_norm(x)), deterministic)
