"""A mixer by `seq.scan`: a gated recurrent unit, whose gates also see the token before."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import MixerConfig, register
from hyena_jax.mixers import Mixer


@dataclass(frozen=True)
class GRUCellConfig(MixerConfig):
    scale: float = 0.5
    """Standard deviation of the initial recurrent weights."""


class GRUCell(Mixer):
    config: GRUCellConfig = GRUCellConfig()

    @staticmethod
    def is_unbounded(config):
        return True

    @nn.compact
    def mix(self, x, seq, deterministic):  # [B, T, D] -> [B, T, D]
        weights = self.param(
            "weights", nn.initializers.normal(self.config.scale), (self.d_model, self.d_model)
        )
        wide = x.astype(weights.dtype)
        z = nn.Dense(2 * self.d_model, name="in_proj")(jnp.concatenate([wide, seq.shift(wide)], axis=-1))

        def step(h, z):  # [B, D], [B, 2 D]
            gate, new = jnp.split(z, 2, axis=-1)
            gate = jax.nn.sigmoid(gate + h @ weights)
            h = gate * h + (1 - gate) * jnp.tanh(new)
            return h, h

        return seq.scan(step, jnp.zeros((len(x), self.d_model), weights.dtype), z).astype(x.dtype)


register("gru_cell", GRUCellConfig, GRUCell)
