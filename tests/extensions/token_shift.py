"""A small mixer: each channel mixes the current token with the previous one, then a dense layer follows."""

from dataclasses import dataclass

import flax.linen as nn
import numpy as np

from hyena_jax.config import MixerConfig, register
from hyena_jax.mixers import Mixer


@dataclass(frozen=True)
class TokenShiftConfig(MixerConfig):
    share: float = 0.5
    """Initial weight of the previous token."""


class TokenShift(Mixer):
    config: TokenShiftConfig = TokenShiftConfig()

    @staticmethod
    def is_unbounded(config):  # generation may go beyond max_len
        return True

    @nn.compact
    def mix(self, x, seq, deterministic):  # [B, T, D] -> [B, T, D]
        share = self.param("share", nn.initializers.constant(self.config.share), (self.d_model,))
        mixed = x + share.astype(x.dtype) * (seq.shift(x) - x)
        return nn.Dense(self.d_model, dtype=self.dtype, name="out_proj")(mixed)


def oracle(config, params, x, max_len, segment_ids):
    """The same in NumPy float64, which `bench` and the contract test compare with; optional."""
    previous = np.zeros_like(x)
    previous[:, 1:] = x[:, :-1] * (segment_ids[:, 1:] == segment_ids[:, :-1])[..., None]
    mixed = x + params["share"] * (previous - x)
    return mixed @ params["out_proj"]["kernel"] + params["out_proj"]["bias"]


register("token_shift", TokenShiftConfig, TokenShift, oracle)
