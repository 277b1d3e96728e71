"""Tests only for Hyena: the initialisation of its forms, and edge cases."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributions import assert_drawn, at

from hyena_jax.config import (
    AnnotatedHyenaConfig,
    FIRConfig,
    GatedHyenaConfig,
    H3Config,
    HyenaConfig,
    S4DConfig,
)
from hyena_jax.mixers import FIR, H3, S4D, AnnotatedHyena, GatedHyena, Hyena
from hyena_jax.mixers.hyena import normalized

pytestmark = pytest.mark.xdist_group("initial_hyena")  # its tests share compiled programs

D, LENGTH = 128, 64
MIXERS = {
    "hyena": Hyena(D, LENGTH, HyenaConfig(order=3, n_heads=8, post_order_ffn=True), n_layers=8),
    "hyena_lecun": Hyena(D, LENGTH, HyenaConfig(short_init="lecun_normal")),
    "annotated": AnnotatedHyena(D, LENGTH, AnnotatedHyenaConfig()),
    "gated": GatedHyena(D, LENGTH, GatedHyenaConfig()),
    "h3": H3(D, LENGTH, H3Config(), n_layers=8),
    "s4d": S4D(D, LENGTH, S4DConfig()),
    "fir": FIR(D, LENGTH, FIRConfig()),
}
UNIFORM = 3**-0.5  # standard deviation of the uniform distribution on -1..1


@cache
def init(name: str) -> dict:
    x = np.zeros((1, 1, D), np.float32)
    return jax.device_get(jax.jit(MIXERS[name].init)(jax.random.key(0), x)["params"])


@pytest.mark.grid
@pytest.mark.parametrize(
    ("path", "deviation"),
    [
        ("hyena/in_proj/kernel", 0.02),
        ("hyena/out_proj/kernel", 0.02 / 4),
        ("hyena/skip", 1.0),
        ("hyena/order_mix", (8 / D) ** 0.5),
        ("hyena/filter/dense_0/kernel", 0.02),
        ("hyena/filter/dense_1/kernel", 0.02),
        ("hyena/filter/dense_3/kernel", 0.02),
        ("hyena/short_taps", 3**-0.5 * UNIFORM),
        ("hyena/short_bias", 3**-0.5 * UNIFORM),
        ("hyena_lecun/short_taps", 3**-0.5),
        ("annotated/in_proj/kernel", D**-0.5 * UNIFORM),
        ("annotated/in_proj/bias", D**-0.5 * UNIFORM),
        ("annotated/out_proj/kernel", D**-0.5 * UNIFORM),
        ("annotated/out_proj/bias", D**-0.5 * UNIFORM),
        ("annotated/short_taps", 3**-0.5 * UNIFORM),
        ("annotated/skip", 1.0),
        ("gated/in_proj/kernel", D**-0.5 * UNIFORM),
        ("gated/out_proj/bias", D**-0.5 * UNIFORM),
        ("h3/shift_c", 64**-0.5 * UNIFORM),
        ("h3/shift_skip", 1.0),
        ("h3/skip", 1.0),
        ("h3/qkv_proj/kernel", 0.02),
        ("h3/out_proj/kernel", 0.02 / 4),
        ("s4d/skip", 1.0),
        ("fir/skip", 1.0),
        ("fir/in_proj/kernel", 0.02),
    ],
)
def test_initial_distributions(path, deviation):
    mixer, path = path.split("/", 1)
    assert_drawn(at(init(mixer), path), deviation)


def test_initial_constants():
    params = init("hyena")
    for module in ("in_proj", "out_proj"):
        assert np.all(params[module]["bias"] == 0)
    assert not init("hyena_lecun")["short_bias"].any()
    assert np.all(params["filter"]["sine_frequency"] == 14.0)
    assert np.abs(params["short_taps"]).max() <= 1 / np.sqrt(3)
    assert set(params["filter"]["dense_3"]) == {"kernel"}
    np.testing.assert_array_equal(init("h3")["shift_b"], np.eye(1, 64).repeat(D, axis=0))


def test_a_gate_of_zeros_is_normalised_to_zeros_with_finite_gradients():
    gate = np.zeros((2, 3, 5), np.float32)
    gate[0, 0, 0] = 1e-30

    @jax.jit
    def run(gate):
        y, pull_back = jax.vjp(normalized, gate)
        return y, *pull_back(jnp.ones_like(y))

    y, gradient = run(gate)
    np.testing.assert_allclose(y, gate * 1e12)
    assert np.isfinite(gradient).all()


def test_dropout_is_on_the_inputs_of_the_convolutions_alone():
    mixer = Hyena(8, 16, HyenaConfig(dropout=0.5))
    x = np.random.default_rng(0).standard_normal((1, 16, 8)).astype(np.float32)
    variables = jax.jit(mixer.init)(jax.random.key(1), x)
    sure = jax.jit(mixer.apply)(variables, x)

    @jax.jit
    def dropped(seed):
        return mixer.apply(variables, x, None, False, rngs={"dropout": jax.random.key(seed)})

    np.testing.assert_array_equal(dropped(0), dropped(0))
    assert not np.array_equal(dropped(0), dropped(1))
    assert not np.array_equal(dropped(0), sure)


def test_out_dropout_is_on_the_input_of_the_last_projection_alone():
    """Each of the projection's two inputs is 0 or doubled, and nothing else changes."""
    mixer = Hyena(2, 1, HyenaConfig(out_dropout=0.5))
    x = np.ones((1, 1, 2), np.float32)
    variables = jax.jit(mixer.init)(jax.random.key(1), x)
    variables["params"]["out_proj"]["kernel"] = np.eye(2, dtype=np.float32)

    def dropped(seed):
        return mixer.apply(variables, x, None, False, rngs={"dropout": jax.random.key(seed)})

    sure = jax.jit(mixer.apply)(variables, x)
    ratios = np.asarray(jax.jit(jax.vmap(dropped))(np.arange(40)) / sure).round(5).reshape(-1, 2)
    found = set(map(tuple, ratios.tolist()))
    assert found == {(0, 0), (0, 2), (2, 0), (2, 2)}


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="n_blocks must be a divisor of max_len=16, got 3"):
        jax.eval_shape(Hyena(8, 16, HyenaConfig(n_blocks=3)).init, jax.random.key(0), jnp.zeros((1, 16, 8)))
