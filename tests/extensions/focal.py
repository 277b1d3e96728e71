"""A loss and a metric: the focal loss (Lin et al. 2017, 1708.02002), and the margin of the right class."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp

from hyena_jax.config import AtLeast, LossConfig, MetricConfig, register


@dataclass(frozen=True)
class FocalConfig(LossConfig):
    """Cross-entropy that counts less where the model is sure: (1 - p)^gamma times -log p."""

    gamma: Annotated[float, AtLeast(0)] = 2.0
    """Exponent; 0 is cross-entropy."""


@dataclass(frozen=True)
class MarginConfig(MetricConfig):
    """The logit of the right class minus the largest other logit."""


def focal(config: FocalConfig, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss [B, L] of logits [B, L, V] at targets [B, L]."""
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    return -((1 - jnp.exp(log_p)) ** config.gamma) * log_p


def margin(config: MarginConfig, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The margin [B, L]; above 0 where the answer is right."""
    is_right = jnp.arange(logits.shape[-1]) == targets[..., None]
    others = jnp.where(is_right, -jnp.inf, logits).max(-1)
    return jnp.where(is_right, logits, 0).sum(-1) - others


register("focal", FocalConfig, focal)
register("margin", MarginConfig, margin)
