"""What the tests of models share."""

import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax import models
from hyena_jax.config import ModelConfig
from hyena_jax.mixers import mixer_class


def random_params(config: ModelConfig, inputs: jax.Array) -> dict:
    """Parameters without zeros and ones, which hide mistakes; initialisers have tests of their own."""
    shapes = jax.eval_shape(models.build(config).init, jax.random.key(0), inputs)["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), shapes)


def mixers_of(config: ModelConfig) -> list:
    """The mixers of the pattern as the oracles of models take them; their own oracles are the contract's."""

    def mixer(mixer_config):
        module = mixer_class(mixer_config)(config.d_model, config.max_len, mixer_config)
        apply = jax.jit(lambda params, x: module.apply({"params": params}, x))
        return lambda params, x: np.float64(apply(params, jnp.float32(x)))

    return [mixer(mixer_config) for mixer_config in config.pattern]
