"""The smallest mixer: each channel interpolates between the current token and the one before it."""

from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp

from hyena_jax.config import MixerConfig, register


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
    def __call__(self, x, segment_ids=None, deterministic=True):
        share = self.param("share", nn.initializers.constant(self.config.share), (self.d_model,))
        share = share.astype(x.dtype)
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return nn.Dense(self.d_model, dtype=self.dtype)((1 - share) * x + share * before)


register("token_shift", TokenShiftConfig, TokenShift)
