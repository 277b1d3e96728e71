"""A mixer with its own operator by `seq.carry`: the running maximum of each channel."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import MixerConfig, register
from hyena_jax.mixers import Mixer


@dataclass(frozen=True)
class RunningMaximumConfig(MixerConfig):
    pass


class RunningMaximum(Mixer):
    config: RunningMaximumConfig = RunningMaximumConfig()

    @staticmethod
    def is_unbounded(config):
        return True

    @nn.compact
    def mix(self, x, seq, deterministic):  # [B, T, D] -> [B, T, D]
        least = jnp.finfo(x.dtype).min
        u = nn.Dense(self.d_model, dtype=self.dtype, name="in_proj")(x)
        y = running_maximum(seq, u, least)
        return nn.Dense(self.d_model, dtype=self.dtype, name="out_proj")(y)


def running_maximum(seq, u, least):
    """max_{s <= t} u_s of u [B, T, D]; its memory is the maximum so far [B, D]."""
    seq.refuse_documents()
    u = seq.masked(u, fill=least)

    def run(before):
        y = jnp.maximum(jax.lax.cummax(u, axis=1), before[:, None])
        return y, y[:, -1]

    return seq.carry("maximum", lambda: jnp.full_like(u[:, 0], least), run)


register("running_maximum", RunningMaximumConfig, RunningMaximum)
