"""Norms over the channels. Axes: D channels."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config.models import Norm
from hyena_jax.mixers.norms import RMSNorm


def make_norm(
    name: Norm, dtype: jnp.dtype | None, eps: float | None = None
) -> Callable[[jax.Array], jax.Array]:
    """The norm that a config names: a module, or the identity for `none`.

    Flax's LayerNorm computes its statistics in float32, too. With eps None it is 1e-5 in LayerNorm, as in
    GPT-2 and PyTorch, and 1e-6 in RMSNorm.
    """
    match name:
        case "layer":
            return nn.LayerNorm(epsilon=1e-5 if eps is None else eps, dtype=dtype)
        case "rms" | "rms_eps_outside":
            return RMSNorm(1e-6 if eps is None else eps, dtype, name == "rms_eps_outside")
        case "none":
            return lambda x: x
