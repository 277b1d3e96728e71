"""Initial parameters are those of `model.init`, bit for bit, from a program that does not grow with depth."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from grid import grid_but

from hyena_jax import models
from hyena_jax.config import (
    AttentionConfig,
    HawkConfig,
    HyenaConfig,
    LanguageModelConfig,
    Mamba2Config,
    RWKV7Config,
    S4DFilterConfig,
)
from hyena_jax.training.drawing import by_kind, recipes
from hyena_jax.training.step import init_params

CONFIG = LanguageModelConfig(d_model=12, d_ff=8, max_len=16, vocab_size=5)
PATTERNS = {
    "hyena": (HyenaConfig(),),
    "hawk": (HawkConfig(),),
    "three": (HawkConfig(), RWKV7Config(n_heads=2), AttentionConfig(n_heads=2)),
    "two": (Mamba2Config(n_heads=2), HyenaConfig(filter=S4DFilterConfig())),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", grid_but(PATTERNS, "hawk"))
def test_bits(name):
    pattern = PATTERNS[name]
    model = models.build(replace(CONFIG, pattern=pattern, n_layers=2 * len(pattern)))
    expected = jax.jit(model.init)(jax.random.key(7), models.example_inputs(model.config))["params"]
    jax.tree.map(np.testing.assert_array_equal, init_params(model, 7), expected)


def test_kinds_do_not_grow_with_depth():
    def kinds(n_layers: int) -> int:
        model = models.build(replace(CONFIG, pattern=(HyenaConfig(),), n_layers=n_layers))
        init = jax.make_jaxpr(lambda key: model.init(key, models.example_inputs(model.config)))
        return len({recipe.kind for recipe in recipes(init(jax.random.key(0)))})

    assert kinds(2) == kinds(5) < 20


def test_constants_inside_of_programs_are_told_apart():
    def init(key):
        return [jax.jit(lambda key, own=own: jax.numpy.asarray(own))(key) for own in np.eye(3)]

    jax.tree.map(np.testing.assert_array_equal, by_kind(init)(jax.random.key(1)), [*np.eye(3)])


def test_values_are_those_of_plain_draws_inside_and_outside_of_a_trace():
    def init(key):
        first, second = jax.random.split(key)
        of_blocks = [jax.random.normal(jax.random.fold_in(key, i), (3,)) for i in range(3)]
        parts = {name: jax.random.fold_in(first, i) for i, name in enumerate("abc")}
        drawn = {name: jax.random.normal(own, (3,)) for name, own in parts.items()}
        rest = {"root": jax.random.normal(second), "const": np.ones(2, np.float32), "zero": 0.0}
        return {**drawn, **rest, "blocks": of_blocks}

    draw, key = by_kind(init), jax.random.key(1)
    traced, expected = jax.jit(lambda key: (draw(key), init(key)))(key)
    for found in (traced, draw(key)):
        jax.tree.map(np.testing.assert_array_equal, found, expected)
