"""An optimizer: steps of fixed size along the sign of each gradient's running mean."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from hyena_jax.config import OptimizerConfig, register


@dataclass(frozen=True)
class SignDescentConfig(OptimizerConfig):
    momentum: float = 0.9
    """Decay of the running mean."""


def make(config, schedule, params):
    return optax.chain(
        optax.ema(config.momentum),
        optax.stateless(lambda updates, _: jax.tree.map(jnp.sign, updates)),
        optax.scale_by_learning_rate(schedule),
    )


register("sign_descent", SignDescentConfig, make)
