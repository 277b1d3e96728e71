"""Tests only for mixers with a matrix memory: sizes, initialisation, and what their options mean."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributions import assert_drawn, assert_uniform
from grid import grid_but
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
from hyena_jax.mixers import RWKV7, GatedDelta, Mamba2, mixer_class
from hyena_jax.mixers.parallel import Parallel
from hyena_jax.ops.initializers import a_log_init, dt_bias_init

X = np.random.default_rng(1).standard_normal((2, 31, 16)).astype(np.float32)
# D and the config of a layer, its number of parameters, and the sizes of the arrays of one row's state.
SIZES = {
    "fla": (2048, GatedDeltaConfig(6, key_dim=256, value_dim=512), 25_215_500, [18_432, 786_432]),
    "qwen3_next": (
        2048,
        GatedDeltaConfig(16, n_value_heads=32, key_dim=128, value_dim=128),
        33_718_464,
        [24_576, 524_288],
    ),
    "fla_kda": (2048, KDAConfig(16, key_dim=128), 17_887_376, [18_432, 262_144]),
    "kimi_linear": (2304, KDAConfig(32, key_dim=128, gate_bias=False), 39_514_272, [36_864, 524_288]),
    "fla_2": (2048, GatedDelta2Config(16, key_dim=128), 26_243_216, [18_432, 262_144]),
    "mamba2_130m": (768, Mamba2Config(24), 3_764_552, [5_376, 196_608]),
    # Angles, memory, and the R inputs of the last token, where the published code keeps x.
    "mamba3": (2048, Mamba3Config(64), 26_165_632, [2_048, 524_288, 8_192, 4_096]),
    "mamba3_mimo": (2048, Mamba3Config(64, n_inputs=4), 27_836_800, [2_048, 524_288, 32_768, 16_384]),
}


@pytest.mark.parametrize("name", grid_but(SIZES, "mamba3", "mamba3_mimo"))
def test_published_sizes(name):
    """The counts of parameters and of the numbers in the state, from the published code."""
    d_model, config, n_parameters, memory = SIZES[name]
    module = mixer_class(config)(d_model, 64, config)
    params = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 4, d_model)))["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == n_parameters
    state = jax.eval_shape(lambda params: module.bind({"params": params}).init_state(1, 64), params)
    assert [leaf.size for leaf in jax.tree.leaves(state.memory)] == memory


def init(module):
    """One token suffices."""
    return jax.jit(module.init)(jax.random.key(0), X[:1, :1])["params"]


def test_initial_decay_rates_are_uniform_and_time_steps_log_uniform():
    key, shape = jax.random.key(0), (4096,)
    for low in (0, 1):
        rates = np.exp(np.float64(a_log_init(low, 16)(key, shape)))
        assert_uniform((rates - low) / (16 - low))
    steps = np.log1p(np.exp(np.float64(dt_bias_init(key, shape))))
    assert_uniform(np.log(steps / 1e-3) / np.log(100))


def test_initial_distributions_of_gated_delta():
    params = init(GatedDelta(16, 31, GatedDeltaConfig()))
    for name in ("qkv_proj", "gate_proj", "out_proj"):
        assert_drawn(params[name]["kernel"], 0.02)
    assert np.all(params["norm"]["scale"] == 1)


def test_initial_distributions_of_mamba2():
    """Uniform within 1 / sqrt(fan_in), the last layer divided by the square root of the depth."""
    params = init(Mamba2(16, 31, Mamba2Config(d_state=8), n_layers=9))
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
    params = init(RWKV7(16, 31, RWKV7Config(2), n_layers=3, layer=1))
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
    ("module", "config"), [(GatedDelta, GatedDeltaConfig(factors=3)), (Mamba2, Mamba2Config(d_state=8))]
)
def test_the_chunk_changes_rounding_alone(module, config):
    """Also of a chunk longer than the sequence, and of one that does not divide it."""
    params = {"params": init(module(16, 31, config))}
    long, short = replace(config, chunk=64), replace(config, chunk=5)
    outputs = [jax.jit(module(16, 31, chunked).apply)(params, X) for chunked in (long, short)]
    assert_close(outputs[1], np.float64(outputs[0]))
    ours, theirs = (Experiment(model=LanguageModelConfig(pattern=(chunked,))) for chunked in (long, short))
    assert identity_differences(ours, theirs) == []
    assert runtime_differences(ours, theirs) == ["model.pattern.0.chunk: 5 -> 64"]


def test_an_update_that_reads_nothing_erases_nothing():
    """S_t = diag(a_t) S_{t-1} + k_t v_t^T: o_t is a sum over the tokens before, with the decays between."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 11, 3, 4))
    log_a = -rng.random((2, 11, 3, 4))
    narrow = (np.float32(z) for z in (q, k, v, log_a))
    found = jax.jit(Parallel((2, 11), None, None).update)(*narrow)
    sums, expected = np.cumsum(log_a, axis=1), np.zeros(v.shape)
    for t in range(11):
        for s in range(t + 1):
            weight = (q[:, t] * np.exp(sums[:, t] - sums[:, s]) * k[:, s]).sum(axis=-1, keepdims=True)
            expected[:, t] += weight * v[:, s]
    assert_close(found, expected)
