"""Helpers of the tests of models."""

from collections.abc import Callable
from functools import cache

import jax
import numpy as np

from hyena_jax import models
from hyena_jax.config import MixerConfig, ModelConfig
from hyena_jax.mixers import mixer_class


def random_params(config: ModelConfig, inputs: jax.Array) -> dict:
    """Random parameters, since initial zeros and ones hide mistakes; initialisers are tested separately."""
    shapes = jax.eval_shape(lambda: models.build(config).init(jax.random.key(0), inputs)["params"])
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(leaf.dtype), shapes)
    return jax.device_put(drawn)


@cache
def applied(config: MixerConfig, d_model: int, max_len: int) -> Callable:
    """(params, x, handed) -> y, and what is handed on; compiled once for all models of these sizes."""
    module = mixer_class(config)(d_model, max_len, config)

    @jax.jit
    def apply(params, x, before):
        after = dict(before)
        return module.apply({"params": params}, x, handed=after), after

    return apply


def mixers_of(config: ModelConfig) -> list:
    """The mixers of the pattern as functions for the oracles of models, for one pass through the model."""
    handed = {}

    def mixer(mixer_config):
        def run(params, x):
            y, after = applied(mixer_config, config.d_model, config.max_len)(params, np.float32(x), handed)
            handed.update(after)
            return np.float64(y)

        return run

    return [mixer(mixer_config) for mixer_config in config.pattern]


def with_dropout(model, params: dict, inputs: jax.Array, seeds: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """The model's outputs when deterministic, and those with the masks of each seed, by one program."""

    @jax.jit
    def run(seeds):
        def dropped(seed):
            rngs = {"dropout": jax.random.key(seed)}
            return model.apply({"params": params}, inputs, None, False, rngs=rngs)

        return model.apply({"params": params}, inputs), jax.vmap(dropped)(seeds)

    return run(seeds)
