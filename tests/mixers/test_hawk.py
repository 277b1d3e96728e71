"""Tests only for Hawk: its initialisation, and document starts."""

from functools import cache

import jax
import numpy as np
import pytest
from distributions import assert_drawn, assert_uniform, at
from tolerances import assert_close

from hyena_jax.config import HawkConfig
from hyena_jax.mixers import Hawk
from hyena_jax.mixers.hawk import ring_init

# The released code's form.
GRIFFIN = HawkConfig(
    width=192, gate_blocks=6, projection_bias=True, gate_bias=True, reset_at_start=True, gelu="tanh"
)
X = np.random.default_rng(1).standard_normal((1, 7, 128)).astype(np.float32)


@cache
def init() -> dict:
    module = Hawk(128, 64, GRIFFIN, n_layers=8)
    return jax.device_get(jax.jit(module.init)(jax.random.key(0), X[:, :1]))["params"]


def bound() -> Hawk:
    return Hawk(128, 64, GRIFFIN, n_layers=8).bind({"params": init()})


@pytest.mark.parametrize(
    ("path", "deviation"),
    [
        ("in_proj/kernel", 128**-0.5),
        ("out_proj/kernel", (2 / (8 * 192)) ** 0.5),
        ("recurrence_gate/kernel", 32**-0.5),
        ("input_gate/kernel", 32**-0.5),
        ("short_taps", (0.01 / 4) ** 0.5),
    ],
)
def test_initial_distributions(path, deviation):
    assert_drawn(at(init(), path), deviation)


def test_initial_biases_are_0():
    for name in ("in_proj", "recurrence_gate", "input_gate", "out_proj"):
        assert np.all(init()[name]["bias"] == 0)
    assert np.all(init()["short_bias"] == 0)


@pytest.mark.parametrize(("ring", "power"), [("a", 1), ("a_to_c", 8)])
def test_initial_factors_are_uniform_by_area_in_the_ring(ring, power):
    rate = np.float64(ring_init(HawkConfig(ring=ring))(jax.random.key(0), (4096,)))
    factors = np.exp(-power * np.log1p(np.exp(rate)))
    assert factors.min() >= 0.9 - 1e-5
    assert factors.max() <= 0.999 + 1e-5
    assert_uniform((factors**2 - 0.9**2) / (0.999**2 - 0.9**2))


def test_documents_in_one_row_equal_separate_rows_where_the_start_is_a_reset():
    together = jax.jit(bound().__call__)(X, np.array([[4, 4, 4, 1, 2, 2, 2]]))
    rows = np.zeros((3, 7, 128), np.float32)
    rows[0, :3], rows[1, :1], rows[2, :3] = X[0, :3], X[0, 3:4], X[0, 4:]
    alone = np.asarray(jax.jit(bound().__call__)(rows))
    assert_close(together[0], np.concatenate([alone[0, :3], alone[1, :1], alone[2, :3]]))


def test_a_row_that_starts_after_the_first_prefill_is_reset_there():
    """A row of a ragged prefill may be all padding; its first token is still to come."""

    @jax.jit
    def run():
        module = bound()
        state, _ = module.prefill(module.init_state(1, 11), 9 * X[:, :4], np.array([0], np.int32))
        state, first = module.step(state, X[:, 0])
        return first, module.prefill(state, X[:, 1:])[1], module(X)

    first, rest, whole = jax.device_get(run())
    assert_close(np.concatenate([first[:, None], rest], axis=1), whole)
