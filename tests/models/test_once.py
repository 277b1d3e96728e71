"""Blocks of a kind are traced once, with the values of blocks that are traced in their place."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import in_wide
from oracles import random_params
from tolerances import assert_close

import hyena_jax
from hyena_jax import models
from hyena_jax.config import MIXER_CONFIGS, AttentionConfig, LanguageModelConfig, MixerConfig
from hyena_jax.mixers import Mixer
from hyena_jax.system.errors import UserError

TOKENS = np.random.default_rng(0).integers(0, 11, (2, 7), np.int32)
DOCUMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]], np.int32)
CONFIG = LanguageModelConfig(n_layers=3, d_model=8, d_ff=16, max_len=7, vocab_size=11)
pytestmark = pytest.mark.usefixtures("own_parts")


def make(*pattern: MixerConfig, **options):
    config = replace(CONFIG, pattern=pattern, **options)
    return models.build(config), random_params(config, TOKENS)


def deep(mixer: type, **options):
    """A model of one's own mixer and of nothing else that has parameters."""
    hyena_jax.register("deep", DeepConfig, mixer)
    return make(DeepConfig(), ffn="none", d_ff=None, **options)


def logits_of(model, params):
    """Traced each time."""
    return jax.jit(lambda params: model.apply({"params": params}, TOKENS))(params)


def in_their_place(run):
    """run(), watched by an interceptor that does nothing."""
    with nn.intercept_methods(lambda method, args, kwargs, context: method(*args, **kwargs)):
        return run()


@dataclass(frozen=True)
class DeepConfig(MixerConfig):
    scale: float = 1.0


class Deep(Mixer):
    """Reads its layer in `mix`."""

    config: DeepConfig = DeepConfig()
    has_constant_state = True
    traced: ClassVar[list[int]] = []

    def mix(self, x, seq, deterministic):
        self.traced.append(self.layer)
        self.sow("intermediates", "layer", self.layer)
        return self.config.scale * self.layer * x


class Flat(Deep):
    reads_layer = False


def learnt(model, params, deterministic: bool = True):
    """The loss and gradients of rows of documents, which a program takes as an argument, as in training."""

    @jax.jit
    def run(params, documents, key):
        def loss(params):
            rngs = {"dropout": key}
            return model.apply({"params": params}, TOKENS, documents, deterministic, rngs=rngs).var()

        return jax.value_and_grad(loss)(params)

    return run(params, DOCUMENTS, jax.random.key(0))


@pytest.mark.parametrize("remat", ["none", *in_wide("block")])
def test_values_and_gradients(remat):
    model, params = make(AttentionConfig(2), n_layers=2, remat=remat)
    jax.tree.map(assert_close, learnt(model, params), in_their_place(lambda: learnt(model, params)))


@pytest.mark.parametrize("remat", ["block", *in_wide("dots")])
def test_what_is_recomputed_draws_the_same_masks(remat):
    found = []
    for policy in ("none", remat):
        model, params = make(AttentionConfig(2), n_layers=1, dropout=0.5, remat=policy)
        found.append(learnt(model, params, False))
    jax.tree.map(assert_close, *found)


@pytest.mark.wide
@pytest.mark.parametrize("remat", ["none", "block"])
@pytest.mark.parametrize("name", MIXER_CONFIGS)
def test_a_step_of_every_mixer_can_be_made(name, remat):
    """With documents, where it keeps them apart, and dropout: no derivative closes over an array."""
    config = replace(
        CONFIG, pattern=(MIXER_CONFIGS[name](),), n_layers=1, d_model=16, dropout=0.5, remat=remat
    )
    model = models.build(config)
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]

    def loss(params, documents, key):
        return model.apply({"params": params}, TOKENS, documents, False, rngs={"dropout": key}).var()

    try:
        jax.jit(jax.grad(loss)).lower(params, DOCUMENTS, jax.random.key(0))
    except UserError:
        jax.jit(jax.grad(loss)).lower(params, None, jax.random.key(0))


def test_a_kind_is_traced_once():
    model, params = deep(Flat)
    for run in (
        lambda params: model.apply({"params": params}, TOKENS),
        lambda params: model.apply({"params": params}, TOKENS, None, False),
        lambda params: model.bind({"params": params}).init_state(2, 7),
    ):
        Flat.traced.clear()
        jax.eval_shape(run, params)
        assert Flat.traced == [0]


def test_a_mixer_that_reads_its_layer_is_traced_in_each():
    model, params = deep(Deep)
    Deep.traced.clear()
    jax.eval_shape(lambda: model.apply({"params": params}, TOKENS))
    assert sorted(Deep.traced) == [0, 1, 2]


def test_a_mixer_that_is_defined_again_is_traced_again():
    model, params = deep(Flat)
    before = logits_of(model, params)

    class Again(Flat):
        def mix(self, x, seq, deterministic):
            return jnp.ones_like(x)

    hyena_jax.register("deep", DeepConfig, Again)
    assert not np.array_equal(logits_of(model, params), before)


def test_what_a_mixer_sows_is_found():
    model, params = deep(Flat)
    sown = jax.jit(lambda: model.apply({"params": params}, TOKENS, mutable=["intermediates"]))()[1]
    found = [sown["intermediates"][f"blocks_{i}"]["mixer"]["layer"][0] for i in range(CONFIG.n_layers)]
    assert found == [0, 1, 2]


def test_dropout_differs_from_layer_to_layer_and_from_key_to_key():
    hyena_jax.register("deep", DeepConfig, Flat)
    model, params = make(DeepConfig(scale=0.0), dropout=0.5, ffn="gelu", n_layers=2)
    params = {**params, "blocks_1": params["blocks_0"]}

    @partial(jax.jit, static_argnums=1)
    def hidden(seed: int, n_blocks: int):
        rngs = {"dropout": jax.random.key(seed)}
        return model.apply({"params": params}, TOKENS, None, False, n_blocks, rngs=rngs, method="hidden")

    first, both, other = hidden(0, 1), hidden(0, 2), hidden(1, 1)
    masks = [np.asarray(y == x) for x, y in ((hidden(0, 0), first), (first, both), (hidden(1, 0), other))]
    for one, two in ((0, 1), (0, 2), (1, 2)):
        assert 0.2 < (masks[one] != masks[two]).mean() < 0.8
    np.testing.assert_array_equal(hidden(0, 2), both)
