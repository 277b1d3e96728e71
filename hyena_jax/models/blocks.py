"""The residual block, for every model. Axes: B batch, L length, T new tokens, D channels."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import BackboneConfig, MixerConfig, ModelConfig
from hyena_jax.initializers import initializers
from hyena_jax.mixers import mixer_class
from hyena_jax.models.norms import make_norm
from hyena_jax.ops.dense import dense_dot_general


class MLP(nn.Module):
    """The feed-forward part: dense -> activation -> dense, or a gated form of it.

    With `geglu`, the hidden layer is gelu_tanh(gate_proj(x)) ⊙ in_proj(x) (Shazeer 2020, arXiv 2002.05202).

    Attributes:
      config: its `ffn`, `d_ff`, `init` and `n_layers` count.
      dtype: of the activations; None follows the input.
    """

    config: BackboneConfig
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """y [..., D] of x [..., D]."""
        hidden = self._dense("in_proj", self.config.d_ff)(x)
        match self.config.ffn:
            case "gelu":
                hidden = nn.gelu(hidden, approximate=False)
            case "gelu_tanh":
                hidden = nn.gelu(hidden, approximate=True)
            case "relu":
                hidden = nn.relu(hidden)
            case "geglu":
                gate = self._dense("gate_proj", self.config.d_ff)(x)
                hidden = nn.gelu(gate, approximate=True) * hidden
        return self._dense("out_proj", x.shape[-1], is_last=True)(hidden)

    def _dense(self, name: str, width: int, is_last: bool = False) -> nn.Dense:
        config = self.config
        init = initializers(config.init, config.n_layers, config.d_model, config.d_ff)
        kernel, bias = (init.out_kernel, init.out_bias) if is_last else (init.kernel, init.bias)
        # Much is computed from the first layers' output; that of the last is only added up.
        product = None if is_last else dense_dot_general
        return nn.Dense(
            width, dtype=self.dtype, kernel_init=kernel, bias_init=bias, dot_general=product, name=name
        )


class Block(nn.Module):
    """x <- x + mixer(norm(x)), then x <- x + mlp(norm(x)); or the bare mixer, x <- mixer(x).

    Decoding follows the mixer contract: the block's state is its mixer's.

    Attributes:
      mixer_config: which mixer.
      model: the config of the model that the block is part of.
      dtype: of the activations; None follows the input.

    Parameters:
      mixer_norm/scale [D]: of LayerNorm the factor, of RMSNorm the factor less 1.
      mixer_norm/bias [D]: only of LayerNorm.
      mixer/*: see the mixer.
      mlp_norm/scale [D]: as mixer_norm/scale.
      mlp_norm/bias [D]: only of LayerNorm.
      mlp/in_proj/kernel [D, d_ff]: the one layer before the activation, or of `geglu` what is gated.
      mlp/in_proj/bias [d_ff]:
      mlp/gate_proj/kernel [D, d_ff]: only of `geglu`, what goes through the GELU.
      mlp/gate_proj/bias [d_ff]:
      mlp/out_proj/kernel [d_ff, D]:
      mlp/out_proj/bias [D]:
    """

    mixer_config: MixerConfig
    model: ModelConfig
    dtype: jnp.dtype | None = None

    def setup(self) -> None:
        model = self.model
        self.mixer_norm = make_norm(model.norm, self.dtype)
        self.mixer = mixer_class(self.mixer_config)(
            model.d_model, model.max_len, self.mixer_config, model.n_layers, self.dtype
        )
        if model.ffn != "none":
            self.mlp_norm = make_norm(model.norm, self.dtype)
            self.mlp = MLP(model, self.dtype)
        self.dropout = nn.Dropout(model.dropout)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D]."""
        y = self.mixer(self.mixer_norm(x), segment_ids, deterministic)
        return self._after_mixer(x, y, deterministic)

    def init_state(self, batch_size: int, max_len: int) -> Any:
        """The mixer's state before the first token."""
        return self.mixer.init_state(batch_size, max_len)

    def prefill(self, state: Any, x: jax.Array, lengths: jax.Array | None = None) -> tuple[Any, jax.Array]:
        """The next T tokens x [B, T, D]."""
        state, y = self.mixer.prefill(state, self.mixer_norm(x), lengths)
        return state, self._after_mixer(x, y)

    def step(self, state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        """The next token x [B, D]."""
        state, y = self.mixer.step(state, self.mixer_norm(x))
        return state, self._after_mixer(x, y)

    def _after_mixer(self, x: jax.Array, y: jax.Array, deterministic: bool = True) -> jax.Array:
        """The block's output, given its input x and the mixer's output y."""
        if not self.model.residual:
            return y
        x = x + self.dropout(y, deterministic)
        if self.model.ffn == "none":
            return x
        return x + self.dropout(self.mlp(self.mlp_norm(x)), deterministic)


def make_blocks(config: ModelConfig, dtype: jnp.dtype | None) -> list[Block]:
    """The n_layers blocks of a model; the pattern of mixers repeats."""
    # The module itself is argument 0, so argument 3 is `deterministic`, a Python bool.
    block = nn.remat(Block, static_argnums=(3,)) if config.remat else Block
    return [block(config.pattern[i % len(config.pattern)], config, dtype) for i in range(config.n_layers)]


def activation_dtype(config: BackboneConfig) -> jnp.dtype | None:
    """What modules take as `dtype`: None, which follows the parameters, unless activations are narrower."""
    return None if config.dtype == "float32" else jnp.dtype(config.dtype)
