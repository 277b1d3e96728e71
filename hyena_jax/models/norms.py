"""Norms over the channels. Axes: D channels."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config.models import Norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (1 + scale) (Zhang and Sennrich 2019, arXiv 1910.07467).

    As in Griffin's released code, `scale` [D] starts at 0 and is added to 1, so that weight decay pulls the
    factor towards 1.

    Attributes:
      epsilon: added to the mean square.
      dtype: of the result; None follows the input. The statistics are float32 at least.
    """

    epsilon: float = 1e-6
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """y [..., D] of x [..., D]."""
        scale = self.param("scale", nn.initializers.zeros, (x.shape[-1],))
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.square(wide).mean(axis=-1, keepdims=True)
        y = wide * jax.lax.rsqrt(mean_square + self.epsilon) * (1 + scale.astype(wide.dtype))
        return y.astype(self.dtype or x.dtype)


def make_norm(name: Norm, dtype: jnp.dtype | None) -> Callable[[jax.Array], jax.Array]:
    """The norm that a config names: a module, or the identity for `none`.

    Flax's LayerNorm computes its statistics in float32, too; eps 1e-5 is GPT-2's and PyTorch's.
    """
    match name:
        case "layer":
            return nn.LayerNorm(epsilon=1e-5, dtype=dtype)
        case "rms":
            return RMSNorm(dtype=dtype)
        case "none":
            return lambda x: x
