"""Token shift, which a block may have before its feed-forward layer. Axes: B batch, T tokens, D channels."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from hyena_jax.config import MixerConfig
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.sequence import Sequence


@dataclass(frozen=True)
class TokenShiftConfig(MixerConfig):
    """Token shift has no options."""


class TokenShift(Mixer):
    """x + mu ⊙ (x' - x), where x' is the token before x, 0 before a document's first (RWKV, 2305.13048).

    Parameters:
      mu [D]: starts at 1 - (c / D)^(q^4) in channel c, q = 1 - layer / n_layers, as in RWKV-7's code.
    """

    config: TokenShiftConfig = TokenShiftConfig()

    @staticmethod
    def is_unbounded(config: TokenShiftConfig) -> bool:
        """The state is one token."""
        return True

    def setup(self) -> None:
        def init(key: jax.Array, shape: tuple[int], dtype: jnp.dtype) -> jax.Array:
            fraction = jnp.arange(self.d_model, dtype=dtype) / self.d_model
            return 1 - fraction ** ((1 - self.layer / self.n_layers) ** 4)

        self.mu = self.param("mu", init, (self.d_model,), jnp.float32)

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        return x + self.mu.astype(x.dtype) * (seq.shift(x) - x)
