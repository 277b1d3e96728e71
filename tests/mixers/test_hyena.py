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
        ("hyena/filter/dense_3/kernel", 0.02),
        ("hyena/short_taps", 3**-0.5 * UNIFORM),
        ("hyena/short_bias", 3**-0.5 * UNIFORM),
        ("hyena_lecun/short_taps", 3**-0.5),
        ("annotated/in_proj/kernel", D**-0.5 * UNIFORM),
        ("annotated/out_proj/bias", D**-0.5 * UNIFORM),
        ("annotated/short_taps", 3**-0.5 * UNIFORM),
        ("annotated/skip", 1.0),
        ("gated/out_proj/bias", D**-0.5 * UNIFORM),
        ("h3/shift_c", 64**-0.5 * UNIFORM),
        ("h3/shift_skip", 1.0),
        ("h3/skip", 1.0),
        ("h3/out_proj/kernel", 0.02 / 4),
        ("s4d/skip", 1.0),
        ("fir/skip", 1.0),
    ],
)
def test_initial_distributions(path, deviation):
    mixer, path = path.split("/", 1)
    assert_drawn(at(init(mixer), path), deviation)


def test_initial_constants():
    params = init("hyena")
    for module in ("in_proj", "out_proj"):
        assert np.all(params[module]["bias"] == 0)
    assert np.all(params["filter"]["sine_frequency"] == 14.0)
    assert np.abs(params["short_taps"]).max() <= 1 / np.sqrt(3)
    assert set(params["filter"]["dense_3"]) == {"kernel"}


@pytest.mark.grid
def test_initial_constants_of_other_forms():
    assert not init("hyena_lecun")["short_bias"].any()
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


def runs(config, x, seeds):
    """The output, and those with dropout of these seeds; the last projection passes its inputs on."""
    mixer = Hyena(x.shape[-1], x.shape[1], config)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(mixer.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda leaf: np.float32(rng.standard_normal(leaf.shape)), shapes)
    variables["params"]["out_proj"]["kernel"] = np.eye(x.shape[-1], dtype=np.float32)
    variables["params"]["out_proj"]["bias"] *= 0

    def dropped(seed):
        return mixer.apply(variables, x, None, False, rngs={"dropout": jax.random.key(seed)})

    @jax.jit
    def run():
        return mixer.apply(variables, x), jax.vmap(dropped)(seeds)

    return jax.device_get(run())


def test_dropout_is_on_the_inputs_of_the_convolutions():
    x = np.random.default_rng(0).standard_normal((1, 16, 8)).astype(np.float32)
    sure, (once, again, other) = runs(HyenaConfig(dropout=0.5), x, np.array([0, 0, 1]))
    np.testing.assert_array_equal(once, again)
    assert not np.array_equal(once, other)
    assert not np.array_equal(once, sure)


def test_out_dropout_is_on_the_input_of_the_last_projection_alone():
    """Each of the projection's two inputs is 0 or doubled, and nothing else changes."""
    sure, dropped = runs(HyenaConfig(out_dropout=0.5), np.ones((1, 1, 2), np.float32), np.arange(40))
    ratios = (dropped / sure).round(5).reshape(-1, 2)
    assert set(map(tuple, ratios.tolist())) == {(0, 0), (0, 2), (2, 0), (2, 2)}


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="n_blocks must be a divisor of max_len=16, got 3"):
        jax.eval_shape(Hyena(8, 16, HyenaConfig(n_blocks=3)).init, jax.random.key(0), jnp.zeros((1, 16, 8)))
