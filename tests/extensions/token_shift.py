"""A small mixer: each channel mixes the current token with the one before, then a dense layer."""

from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp

from hyena_jax.config import MixerConfig, register
from hyena_jax.mixers import inputs


@dataclass(frozen=True)
class TokenShiftConfig(MixerConfig):
    share: float = 0.5
    """Initial weight of the token before."""


class TokenShift(nn.Module):
    d_model: int
    max_len: int
    config: TokenShiftConfig = TokenShiftConfig()
    n_layers: int = 1
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x, segment_ids=None, deterministic=True):  # [B, L, D] -> [B, L, D]
        inputs.check_input(x, self.d_model, self.max_len)
        inputs.refuse_segments(segment_ids)
        share = self.param("share", nn.initializers.constant(self.config.share), (self.d_model,))
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        mixed = x + share.astype(x.dtype) * (before - x)
        return nn.Dense(self.d_model, dtype=self.dtype, name="out_proj")(mixed)


def oracle(config, params, x, max_len, segment_ids):
    """The same in NumPy float64, for `bench` and the contract test to compare with; it may be left out."""
    before = x * 0
    before[:, 1:] = x[:, :-1]
    mixed = x + params["share"] * (before - x)
    return mixed @ params["out_proj"]["kernel"] + params["out_proj"]["bias"]


register("token_shift", TokenShiftConfig, TokenShift, oracle)
