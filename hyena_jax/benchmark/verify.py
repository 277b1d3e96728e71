"""Checks before timing: every mixer and model is compared with its float64 oracle."""

import contextlib
from dataclasses import fields, replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax import models
from hyena_jax.config import MODEL_CONFIGS, LanguageModelConfig, MixerConfig, ModelConfig, own_code
from hyena_jax.data.examples import random_inputs
from hyena_jax.mixers import mixer_class, mixer_oracle
from hyena_jax.system.errors import UserError

# The largest error that counts as equal, relative to the oracle's largest magnitude.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
# An odd length, small enough for loops in Python; filters are defined over the longer MAX_LEN.
BATCH, LENGTH, MAX_LEN = 2, 33, 128
LARGEST_WIDTH, LARGEST_VOCABULARY = 64, 61
# Scale of the noise added to initial parameters, since zeros would hide mistakes. Small, because the filters'
# sine networks amplify rounding errors when kernels are large.
NOISE = 0.02


class Mismatch(Exception):
    """A mixer or model differs from its oracle, so it is not timed."""


def relative_error(actual: jax.Array, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest expected magnitude; NaN if a value is."""
    actual = np.asarray(actual).astype(np.complex128 if np.iscomplexobj(actual) else np.float64)
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def require_close(what: str, actual: jax.Array, expected: np.ndarray, dtype: str) -> None:
    """Raises Mismatch unless both agree within the tolerance of `dtype`; NaN never agrees."""
    require_small(what, relative_error(actual, expected), dtype)


def require_small(what: str, error: float, dtype: str) -> None:
    """Raises Mismatch if the error, relative to the largest value, is above the tolerance of `dtype`."""
    if not error <= TOLERANCE[dtype]:
        raise Mismatch(
            f"{what} differs from its oracle by {error:.2g} of the largest value in {dtype}, more than "
            f"{TOLERANCE[dtype]:g}; nothing was timed"
        )


def verify_mixer(name: str, config: MixerConfig, d_model: int, dtype: str) -> bool:
    """Compares the parallel form with the NumPy oracle, at an odd length; False if the mixer has none."""
    oracle = mixer_oracle(config)
    if oracle is None:
        return False
    width = small_width(config, d_model)
    module = mixer_class(config)(width, MAX_LEN, config, 1, jnp.dtype(dtype))
    x = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, width)).astype(dtype)
    params = random_params(module, x)
    y = jax.jit(lambda params, x: module.apply({"params": params}, x, None, True))(params, x)
    require_close(name, y, oracle(jax.device_get(params), np.asarray(x, np.float64), MAX_LEN), dtype)
    return True


def verify_model(name: str, config: ModelConfig) -> bool:
    """Compares the logits of a small model of the same blocks; False if it, or a mixer, has no oracle."""
    oracle = MODEL_CONFIGS.oracle(type(config))
    small = small_model(config)
    found = [mixer_oracle(mixer) for mixer in getattr(small, "pattern", ())]
    if oracle is None or None in found:
        return False
    handed = {}
    mixers = [lambda params, x, of=of: of(params, x, small.max_len, None, handed) for of in found]
    model = models.build(small)
    inputs = random_inputs(small, BATCH, min(LENGTH, getattr(small, "max_len", LENGTH)))
    params = random_params(model, inputs)
    logits = jax.jit(lambda params, x: model.apply({"params": params}, x, None, True))(params, inputs)
    expected = oracle(jax.device_get(params), np.asarray(inputs), small, mixers)
    require_close(name, logits, expected, getattr(config, "dtype", "float32"))
    return True


def decoding_error(small: LanguageModelConfig) -> float:
    """The relative error of a small model's prefill and steps beside its parallel form."""
    model = models.build(small)
    length = min(LENGTH, small.max_len)
    tokens = random_inputs(small, BATCH, length)
    params = random_params(model, tokens)

    @jax.jit
    def both(params: dict) -> tuple[jax.Array, jax.Array]:
        bound = model.bind({"params": params})
        state, first = bound.prefill(bound.init_state(BATCH, length), tokens[:, :-2])
        state, second = bound.step(state, tokens[:, -2])
        parts = [first, second[:, None], bound.step(state, tokens[:, -1])[1][:, None]]
        return jnp.concatenate(parts, axis=1), bound(tokens)

    decoded, parallel = both(params)
    return relative_error(decoded, np.float64(parallel))


def initial_params(module: nn.Module, inputs: jax.Array, seed: int) -> dict:
    """Initial parameters of a mixer or a model; empty if it has none. UserError if a plugin's part fails."""
    with own_code("your plugin failed", module.config):  # also if its result is no array
        jax.eval_shape(partial(module.init_with_output, jax.random.key(seed)), inputs, None, True)
    init = jax.jit(lambda key, inputs: module.init(key, inputs, None, True))
    return init(jax.random.key(seed), inputs).get("params", {})


def random_params(module: nn.Module, inputs: jax.Array) -> dict:
    """Initial parameters with a little noise, as NumPy arrays."""
    rng = np.random.default_rng(2)
    params = jax.device_get(initial_params(module, inputs, 1))
    return jax.tree.map(lambda x: x + (NOISE * rng.standard_normal(x.shape)).astype(x.dtype), params)


def small_width(config: MixerConfig, d_model: int) -> int:
    """The smallest width up to d_model that the mixer allows, which is quick for loops in Python."""
    least = 8 * getattr(config, "n_heads", 1)  # rotary pairs of one speed hide mistakes in the others
    for width in (16, 32, LARGEST_WIDTH):
        if width < min(least, LARGEST_WIDTH):
            continue
        with contextlib.suppress(UserError):  # heads that do not divide it
            config.check(width, MAX_LEN)
            return min(width, d_model)
    return d_model


def small_model(config: ModelConfig) -> ModelConfig:
    """The same kind of model with each mixer, narrow and short where its parts allow it."""
    largest = {
        "dropout": 0.0,
        "n_layers": max(2, len(getattr(config, "pattern", ()))),  # layers may hand values on
        "max_len": MAX_LEN,
        "vocab_size": LARGEST_VOCABULARY,
        "d_model": LARGEST_WIDTH,
    }
    for name in [field.name for field in fields(config) if field.name in largest]:
        value = getattr(config, name)
        if value is not None and value > largest[name]:
            try:
                config = replace(config, **{name: largest[name]})
            except UserError:  # heads that do not divide the width, blocks that do not divide the length
                continue
    return config
