"""No speed of what is wrong: every mixer and model is compared with its float64 oracle before it is timed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax import models
from hyena_jax.config import (
    MIXER_CONFIGS,
    ImageClassifierConfig,
    LanguageModelConfig,
    MixerConfig,
    ModelConfig,
    UserError,
)
from hyena_jax.mixers import mixer_class, mixer_oracle
from hyena_jax.reference import models as model_oracles

# How far from the oracle is equal, relative to its largest magnitude.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
# Odd, small enough for loops in Python; filters are defined by the longer MAX_LEN.
BATCH, LENGTH, MAX_LEN = 2, 33, 128
LARGEST_WIDTH, LARGEST_VOCABULARY = 64, 61
# Of the random numbers added to initial parameters, so that zeros hide no mistakes. Small: the sine networks
# of filters magnify rounding by large kernels.
NOISE = 0.02


class Mismatch(Exception):
    """What was to be timed differs from its oracle."""


def compare(what: str, actual: jax.Array, expected: np.ndarray, dtype: str) -> None:
    """Raises Mismatch unless both are equal within the tolerance of `dtype`; NaN equals nothing."""
    actual = np.asarray(actual).astype(np.float64)
    error = np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30)
    if not error <= TOLERANCE[dtype]:
        raise Mismatch(
            f"{what} differs from its oracle by {error:.2g} of the largest value in {dtype}, more than "
            f"{TOLERANCE[dtype]:g}; nothing was timed"
        )


def verify_mixer(name: str, config: MixerConfig, d_model: int, dtype: str) -> None:
    """Compares the parallel form with the NumPy oracle, at an odd length and a width of at most 64.

    Raises:
      Mismatch: where they differ.
    """
    width = _width(config, d_model)
    module = mixer_class(config)(width, MAX_LEN, config, dtype=jnp.dtype(dtype))
    x = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, width)).astype(dtype)
    params = random_params(module, x)
    y = jax.jit(lambda params, x: module.apply({"params": params}, x))(params, x)
    expected = mixer_oracle(config)(jax.device_get(params), np.asarray(x, np.float64), MAX_LEN)
    compare(name, y, expected, dtype)


def verify_baseline(what: str, mixer: str, baseline: Callable, d_model: int, dtype: str) -> None:
    """Compares a baseline with our mixer of default options, which equals the oracle: y and x's gradient.

    Args:
      what: the baseline's name, for the message.
      mixer: the mixer's.
      baseline: (config, params, x [B, L, D], cotangent, max_len) -> y, gradient of x; arrays of any kind.

    Raises:
      Mismatch: where they differ.
    """
    config = MIXER_CONFIGS[mixer]()
    width = _width(config, d_model)
    module = mixer_class(config)(width, MAX_LEN, config, dtype=jnp.dtype(dtype))
    x, cotangent = (
        jax.random.normal(jax.random.key(i), (BATCH, LENGTH, width)).astype(dtype) for i in range(2)
    )
    params = random_params(module, x)

    def ours(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, pullback = jax.vjp(lambda x: module.apply({"params": params}, x), x)
        return y, pullback(cotangent)[0]

    expected = jax.jit(ours)(x)
    actual = baseline(config, params, x, cotangent, MAX_LEN)
    for part, a, e in zip(("", ", gradient of the input,"), actual, expected, strict=True):
        compare(what + part, a, np.asarray(e).astype(np.float64), dtype)


def verify_model(name: str, config: ModelConfig) -> None:
    """Compares a small model of the same blocks with the oracle of models: logits.

    Raises:
      Mismatch: where they differ.
    """
    small = _small(config)
    model = models.build(small)
    inputs = example_inputs(small, BATCH, min(LENGTH, small.max_len))
    params = random_params(model, inputs)
    logits = jax.jit(lambda params, x: model.apply({"params": params}, x))(params, inputs)
    mixers = [partial(_oracle, mixer, small.max_len) for mixer in small.pattern]
    is_text = isinstance(small, LanguageModelConfig)
    oracle = model_oracles.language_model if is_text else model_oracles.image_classifier
    expected = oracle(jax.device_get(params), np.asarray(inputs), small, mixers)
    compare(name, logits, expected, config.dtype)


def verify_decoding(name: str, config: LanguageModelConfig) -> None:
    """Compares a prefill and steps of a small model with its parallel form.

    Raises:
      Mismatch: where they differ.
    """
    small = _small(config)
    model = models.build(small)
    length = min(LENGTH, small.max_len)
    tokens = example_inputs(small, BATCH, length)
    params = random_params(model, tokens)
    expected = np.float64(jax.jit(lambda params: model.apply({"params": params}, tokens))(params))

    def decode(params: dict) -> jax.Array:
        bound = model.bind({"params": params})
        state, first = bound.prefill(bound.init_state(BATCH, length), tokens[:, :-2])
        state, second = bound.step(state, tokens[:, -2])
        return jnp.concatenate([first, second[:, None], bound.step(state, tokens[:, -1])[1][:, None]], axis=1)

    compare(f"decoding with {name}", jax.jit(decode)(params), expected, config.dtype)


def example_inputs(config: ModelConfig, batch: int, length: int) -> jax.Array:
    """Random tokens int32 [B, L], or images float32 [B, height, width, colours]."""
    if isinstance(config, ImageClassifierConfig):
        return jax.random.normal(jax.random.key(0), (batch, *config.image_size, config.channels))
    return jax.random.randint(jax.random.key(0), (batch, length), 0, config.vocab_size)


def random_params(module: nn.Module, inputs: jax.Array) -> dict:
    """Initial parameters, each moved a little."""
    params = jax.jit(module.init)(jax.random.key(1), inputs)["params"]
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    moved = [x + NOISE * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
    return structure.unflatten(moved)


def _width(config: MixerConfig, d_model: int) -> int:
    """A width that is quick for loops in Python, if the mixer can have it."""
    small = min(d_model, LARGEST_WIDTH)
    try:
        config.check(small, MAX_LEN)
    except UserError:  # heads that do not divide it
        return d_model
    return small


def _oracle(config: MixerConfig, max_len: int, params: dict, x: np.ndarray) -> np.ndarray:
    return mixer_oracle(config)(params, x, max_len)


def _small(config: ModelConfig) -> ModelConfig:
    """The same kind of model with each of its mixers once, narrow where the mixers allow it."""
    small = replace(config, n_layers=len(config.pattern), dropout=0.0)
    if isinstance(config, LanguageModelConfig):
        vocab_size = min(config.vocab_size, LARGEST_VOCABULARY)
        small = replace(small, max_len=min(config.max_len, MAX_LEN), vocab_size=vocab_size)
    try:
        return replace(small, d_model=min(config.d_model, LARGEST_WIDTH))
    except UserError:  # heads that do not divide it
        return small
