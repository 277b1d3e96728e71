"""The autoencoder of sequences. Axes: B batch, L length, D channels of the model, V vocabulary."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.config import AutoencoderConfig
from hyena_jax.mixers.layers import Embed, make_norm
from hyena_jax.models.blocks import activation_dtype, apply_blocks, make_blocks
from hyena_jax.ops.forms import Layout
from hyena_jax.ops.initializers import initializers
from hyena_jax.system.errors import require

LONGEST_PERIOD = 10_000.0
"""The slowest sine of the positions has 2 pi times this period."""


class Autoencoder(nn.Module):
    """Blocks read a sequence, and a decoder reconstructs it from the last output alone (MAD, 2403.17844).

    The decoder adds sinusoidal positions p_i to the last output x_L of the blocks, then applies two layers
    z <- GELU(dense(norm(z))), and the head to norm(z). Id i of the result sees x_L + p_i and nothing else.

    Attributes:
      config: its vocab_size V must be known.

    Parameters:
      embedding/embedding [V, D]: row i is token i.
      positions [Lmax, D]: row t is added at position t before the blocks; only with learned_positions.
      blocks_0/*: and so on for n_layers blocks.
      decoder_norms_0/scale [D]: of LayerNorm the factor, of RMSNorm the factor less 1; also decoder_norms_1.
      decoder_norms_0/bias [D]: only of LayerNorm.
      decoder_0/kernel [D, D]: and decoder_1 for the second layer.
      decoder_0/bias [D]:
      final_norm/scale [D]: as decoder_norms_0/scale.
      final_norm/bias [D]: only of LayerNorm.
      head/kernel [D, V]:
      head/bias [V]:
    """

    config: AutoencoderConfig
    layout: Layout = Layout()

    def setup(self) -> None:
        config = self.config
        dtype = activation_dtype(config)
        init = initializers(config.init, config.n_layers, config.d_model, config.d_model)
        self.embedding = Embed(config.vocab_size, config.d_model, dtype=dtype, embedding_init=init.embedding)
        if config.learned_positions:
            shape = config.max_len, config.d_model
            self.positions = self.param("positions", init.embedding, shape, jnp.float32)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = make_blocks(config, dtype, None, self.layout)
        self.decoder_norms = [make_norm(config.final_norm, dtype, config.norm_eps) for _ in range(2)]
        self.decoder = [
            nn.Dense(config.d_model, dtype=dtype, kernel_init=init.kernel, bias_init=init.bias)
            for _ in range(2)
        ]
        self.final_norm = make_norm(config.final_norm, dtype, config.norm_eps)
        self.head = nn.Dense(config.vocab_size, dtype=dtype, kernel_init=init.head, bias_init=init.bias)

    def __call__(self, tokens: jax.Array, segment_ids: None = None, deterministic: bool = True) -> jax.Array:
        """Logits float32 [B, L, V] of the same tokens, from the last position's output.

        Raises:
          ValueError: if tokens are not integers [B, L] with L in 1..max_len.
        """
        config = self.config
        require(tokens.ndim == 2 and len(tokens) >= 1, "tokens.shape", tokens.shape, "[B, L]")
        is_integer = jnp.issubdtype(tokens.dtype, jnp.integer)
        require(is_integer, "tokens.dtype", str(tokens.dtype), "an integer type")
        length = tokens.shape[1]
        require(1 <= length <= config.max_len, "sequence length", length, f"in 1..max_len={config.max_len}")
        require(segment_ids is None, "segment_ids", segment_ids, "None: a row is one sequence")
        x = self.embedding(tokens)
        if config.learned_positions:
            x = x + self.positions[:length].astype(x.dtype)
        x = apply_blocks(self.blocks, self.dropout(x, deterministic), None, deterministic)
        z = x[:, -1:] + sinusoidal_positions(length, config.d_model).astype(x.dtype)
        for norm, dense in zip(self.decoder_norms, self.decoder, strict=True):
            z = nn.gelu(dense(norm(z)), approximate=False)
        logits = self.head(self.final_norm(z))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def sinusoidal_positions(length: int, d_model: int) -> np.ndarray:
    """Rows (sin(t w), cos(t w)) float32 [length, d_model], w_k = LONGEST_PERIOD^(-k / (d_model / 2 - 1))."""
    half = d_model // 2
    w = LONGEST_PERIOD ** -(np.arange(half) / (half - 1))
    angle = np.arange(length)[:, None] * w
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)
