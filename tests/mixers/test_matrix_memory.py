"""Tests only for mixers with a matrix memory: sizes, initialisation, and what their options mean."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributions import assert_drawn, assert_uniform
from tolerances import assert_close

from hyena_jax.config import (
    Experiment,
    GatedDelta2Config,
    GatedDeltaConfig,
    KDAConfig,
    LanguageModelConfig,
    Mamba2Config,
    Mamba3Config,
    RWKV7Config,
)
from hyena_jax.config.files import identity_differences, runtime_differences
from hyena_jax.mixers import KDA, RWKV7, GatedDelta, GatedDelta2, Mamba2, Mamba3
from hyena_jax.mixers.parallel import Parallel
from hyena_jax.ops.initializers import a_log_init, dt_bias_init

# The sizes of a layer in fla's models, of one in Qwen3-Next, one in Kimi Linear, and one in Mamba-2 130M.
FLA = GatedDeltaConfig(6, key_dim=256, value_dim=512)
QWEN3_NEXT = GatedDeltaConfig(16, n_value_heads=32, key_dim=128, value_dim=128)
FLA_KDA, FLA_2 = KDAConfig(16, key_dim=128), GatedDelta2Config(16, key_dim=128)
KIMI_LINEAR = KDAConfig(32, key_dim=128, gate_bias=False)
MAMBA2_130M = Mamba2Config(24)
MAMBA3, MAMBA3_MIMO = Mamba3Config(64), Mamba3Config(64, n_inputs=4)
X = np.random.default_rng(1).standard_normal((2, 31, 16)).astype(np.float32)


def shapes(module, d_model):
    return jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 4, d_model)))["params"]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("module", "n_parameters", "memory", "history"),
    [
        (GatedDelta(2048, 64, FLA), 25_215_500, 786_432, 18_432),
        (GatedDelta(2048, 64, QWEN3_NEXT), 33_718_464, 524_288, 24_576),
        (KDA(2048, 64, FLA_KDA), 17_887_376, 262_144, 18_432),
        (KDA(2304, 64, KIMI_LINEAR), 39_514_272, 524_288, 36_864),
        (GatedDelta2(2048, 64, FLA_2), 26_243_216, 262_144, 18_432),
        (Mamba2(768, 64, MAMBA2_130M), 3_764_552, 196_608, 5_376),
    ],
)
def test_published_sizes(module, n_parameters, memory, history):
    """The counts of parameters and of the numbers in the state of one row, from the published code."""
    params = shapes(module, module.d_model)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == n_parameters
    state = jax.eval_shape(lambda params: module.bind({"params": params}).init_state(1, 64), params)
    assert (state.memory["update_0"].size, state.memory["fir_0"].size) == (memory, history)


@pytest.mark.parametrize(
    ("config", "n_parameters", "n_state"),
    [(MAMBA3, 26_165_632, 538_624), (MAMBA3_MIMO, 27_836_800, 524_288 + 2_048 + 4 * (8_192 + 4_096))],
)
def test_published_sizes_of_mamba3(config, n_parameters, n_state):
    """Our state keeps the R inputs of the last token, where the published code keeps x."""
    module = Mamba3(2048, 64, config)
    params = shapes(module, module.d_model)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == n_parameters
    state = jax.eval_shape(lambda params: module.bind({"params": params}).init_state(1, 64), params)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.memory)) == n_state


@pytest.mark.parametrize(("low", "high"), [(0, 16), (1, 16)])
def test_initial_decay_rates_are_uniform(low, high):
    rates = np.exp(np.float64(a_log_init(low, high)(jax.random.key(0), (4096,))))
    assert_uniform((rates - low) / (high - low))


def test_initial_time_steps_are_log_uniform():
    steps = np.log1p(np.exp(np.float64(dt_bias_init(jax.random.key(0), (4096,)))))
    assert_uniform(np.log(steps / 1e-3) / np.log(100))


def test_initial_distributions_of_gated_delta():
    params = jax.jit(GatedDelta(16, 31, GatedDeltaConfig()).init)(jax.random.key(0), X)["params"]
    for name in ("qkv_proj", "gate_proj", "out_proj"):
        assert_drawn(params[name]["kernel"], 0.02)
    assert np.all(params["norm"]["scale"] == 1)


def test_initial_distributions_of_mamba2():
    """Uniform within 1 / sqrt(fan_in), the last layer divided by the square root of the depth."""
    params = jax.jit(Mamba2(16, 31, Mamba2Config(d_state=8), n_layers=9).init)(jax.random.key(0), X)["params"]
    for values, bound in (
        (params["in_proj"]["kernel"], 1 / 4),
        (params["out_proj"]["kernel"], 1 / np.sqrt(32) / 3),
        (params["short_taps"], 1 / 2),
        (params["short_bias"], 1 / 2),
    ):
        assert 0.8 * bound < np.abs(values).max() <= bound
        assert_drawn(values, bound / np.sqrt(3))
    assert np.all(params["skip"] == 1)


def test_initial_constants_of_rwkv7():
    """The formulas of the published code, for the second of three layers and two heads of 8 channels."""
    module = RWKV7(16, 31, RWKV7Config(2), n_layers=3, layer=1)
    params = jax.jit(module.init)(jax.random.key(0), X)["params"]
    c, line = np.arange(16), np.arange(16) / 15
    zigzag = (c % 8 - 3.5) / 3.5
    powers = np.array([0.2, 0.9, 0.7, 0.7, 0.9, 0.2]) * (1 - 1 / 3)
    assert_close(params["shift_mix"], 1 - (c / 16) ** powers[:, None])
    assert_close(params["decay"]["bias"], -5.5 + 6 * line ** (1 + 0.5**0.3) + 2.5 * zigzag * abs(zigzag))
    assert_close(params["rate"]["bias"], -0.19 + 0.3 * zigzag * abs(zigzag) + 0.4 * (line - 0.5))
    assert_close(params["removal"], 0.71 - 0.1 * (line - 0.5))
    assert_close(params["norm"]["scale"], np.full(16, (2 / 3) ** 0.7))
    assert not params["out_proj"]["kernel"].any()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("module", "config"),
    [
        (GatedDelta, GatedDeltaConfig(factors=3)),
        pytest.param(Mamba2, Mamba2Config(d_state=8), marks=pytest.mark.grid),
    ],
)
def test_the_chunk_changes_rounding_alone(module, config):
    """Also of a chunk longer than the sequence, and of one that does not divide it."""
    params = jax.jit(module(16, 31, config).init)(jax.random.key(0), X)
    outputs = []
    for chunk in (64, 5):
        mixer = module(16, 31, replace(config, chunk=chunk))
        outputs.append(jax.jit(mixer.apply)(params, X))
    assert_close(outputs[1], np.float64(outputs[0]))
    ours, theirs = (
        Experiment(model=LanguageModelConfig(pattern=(replace(config, chunk=chunk),))) for chunk in (64, 5)
    )
    assert identity_differences(ours, theirs) == []
    assert runtime_differences(ours, theirs) == ["model.pattern.0.chunk: 5 -> 64"]


def test_an_update_that_reads_nothing_erases_nothing():
    """S_t = diag(a_t) S_{t-1} + k_t v_t^T: o_t is a sum over the tokens before, with the decays between."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 11, 3, 4))
    log_a = -rng.random((2, 11, 3, 4))
    narrow = (jnp.asarray(z, jnp.float32) for z in (q, k, v, log_a))
    found = Parallel((2, 11), None, None).update(*narrow)
    sums, expected = np.cumsum(log_a, axis=1), np.zeros(v.shape)
    for t in range(11):
        for s in range(t + 1):
            weight = (q[:, t] * np.exp(sums[:, t] - sums[:, s]) * k[:, s]).sum(axis=-1, keepdims=True)
            expected[:, t] += weight * v[:, s]
    assert_close(found, expected)
