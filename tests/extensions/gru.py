"""A whole model: token embedding, one Flax GRU, and a head."""

from dataclasses import dataclass

import flax.linen as nn

from hyena_jax.config import ModelConfig, register


@dataclass(frozen=True)
class GRUConfig(ModelConfig):
    width: int = 32
    """Channels of the embedding and of the GRU."""
    max_len: int = 256
    """Longest sequence."""
    vocab_size: int | None = None
    """Symbols; None takes the tokenizer's."""


class GRU(nn.Module):
    config: GRUConfig

    @nn.compact
    def __call__(self, tokens, segment_ids=None, deterministic=True):
        x = nn.Embed(self.config.vocab_size, self.config.width)(tokens)
        return nn.Dense(self.config.vocab_size)(nn.RNN(nn.GRUCell(self.config.width))(x))


register("gru", GRUConfig, GRU)
