"""A mixer: an exponential moving average with a trained decay per channel, behind a short convolution."""

from dataclasses import dataclass

import flax.linen as nn
import numpy as np

from hyena_jax.config import MixerConfig, register
from hyena_jax.mixers import Mixer


@dataclass(frozen=True)
class EMAConfig(MixerConfig):
    decay: float = 0.9
    """Initial decay a of every channel in y_t = a y_{t-1} + (1 - a) u_t."""


class EMA(Mixer):
    config: EMAConfig = EMAConfig()

    @staticmethod
    def is_unbounded(config):
        return True

    @nn.compact
    def mix(self, x, seq, deterministic):  # [B, T, D] -> [B, T, D]
        taps = self.param("taps", nn.initializers.normal(0.5), (self.d_model, 4))
        a = self.param("decay", nn.initializers.constant(self.config.decay), (self.d_model,))
        u = seq.fir(x.astype(a.dtype), taps)
        return seq.recur(a, (1 - a) * u).astype(x.dtype)


def oracle(config, params, x, max_len, segment_ids):
    """The same in NumPy float64, which `bench` and the contract test compare with; optional."""
    y, a, taps = np.zeros_like(x), params["decay"], params["taps"]
    for row, ids, out in zip(x, segment_ids, y, strict=True):
        for t in range(len(row)):
            begin = t if t == 0 or ids[t] != ids[t - 1] else begin  # noqa: F821 - set at t = 0
            u = sum(taps[:, k] * row[t - k] for k in range(min(4, t - begin + 1)))
            out[t] = (1 - a) * u + (a * out[t - 1] if t > begin else 0)
    return y


register("ema", EMAConfig, EMA, oracle)
