from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from differences import assert_equal_differences
from tolerances import assert_close

from hyena_jax.mixers.layers import RMSNorm, make_norm
from hyena_jax.reference import layers as reference

X = np.random.default_rng(0).standard_normal((2, 3, 7))
SCALE = np.random.default_rng(1).standard_normal(7)
RMS = ("rms", "rms_eps_outside")


def test_rms_norm_starts_with_factor_one_and_unit_mean_square():
    params = RMSNorm().init(jax.random.key(0), jnp.float32(X))["params"]
    np.testing.assert_array_equal(params["scale"], np.zeros(7))
    y = RMSNorm().apply({"params": params}, jnp.float32(1e3 * X))
    assert_close(jnp.square(y).mean(-1), np.ones((2, 3)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["layer", *RMS])
@pytest.mark.parametrize("eps", [None, 0.1])
def test_equals_its_oracle(name, eps, dtype):
    params = {"scale": SCALE} if name in RMS else {"scale": SCALE, "bias": SCALE[::-1]}
    with jax.enable_x64(dtype == "float64"):
        narrow = jax.tree.map(lambda x: x.astype(dtype), params)
        y = jax.jit(make_norm(name, None, eps).apply)({"params": narrow}, X.astype(dtype))
    assert y.dtype == dtype
    assert_close(y, reference.norm(params, X, name, eps))


@pytest.mark.grid
@pytest.mark.parametrize("name", ["layer", *RMS, "none"])
def test_derivatives_in_both_modes(name):
    with jax.enable_x64(True):
        norm = make_norm(name, None)
        if name == "none":
            check_modes(norm, X, is_thorough=True)
        else:
            params = norm.init(jax.random.key(0), X)
            check_modes(lambda args: norm.apply(*args), (params, X), is_thorough=True)


@partial(jax.jit, static_argnums=(2, 3))
def value_and_gradient(x, weight, name, eps=None):
    params = {"scale": jnp.asarray(SCALE, x.dtype)}
    norm = make_norm(name, None, eps)
    return jax.value_and_grad(lambda x: (weight * norm.apply({"params": params}, x)).sum())(x)


@pytest.mark.parametrize("name", RMS)
def test_rms_norm_gradients_equal_central_differences_of_the_oracle(name):
    weight = np.random.default_rng(2).standard_normal(X.shape)
    with jax.enable_x64(True):
        _, gradient = jax.device_get(value_and_gradient(X, weight, name))

    def oracle(x):
        return (weight * reference.norm({"scale": SCALE}, x, name)).sum()

    assert_equal_differences(gradient, oracle, (X,))


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e18])
@pytest.mark.parametrize("name", RMS)
@pytest.mark.parametrize("eps", [None, 1e-20])
def test_rms_norm_is_finite_at_extremes(name, eps, size):
    y, gradient = value_and_gradient(np.float32(size * X), np.float32(1), name, eps)
    assert np.isfinite(y)
    assert np.isfinite(gradient).all()


def test_with_eps_outside_the_root_zeros_have_the_gradient_of_their_neighbourhood():
    for size in (0.0, 1e-15):
        _, gradient = value_and_gradient(np.float32(size * X), np.float32(1), "rms_eps_outside", 1e-3)
        assert_close(gradient, np.broadcast_to(1e3 * (1 + SCALE), X.shape))


@pytest.mark.parametrize("name", ["layer", *RMS])
def test_statistics_of_bfloat16_are_float32(name):
    x, norm = jnp.asarray(300 + X, jnp.bfloat16), make_norm(name, jnp.bfloat16)
    params = {"scale": np.float32(SCALE)} | ({"bias": np.float32(SCALE[::-1])} if name == "layer" else {})
    y = jax.jit(norm.apply)({"params": params}, x)
    assert y.dtype == jnp.bfloat16
    assert_close(y, reference.norm(params, np.float64(x), name))


def test_no_norm_is_the_identity():
    np.testing.assert_array_equal(make_norm("none", None)(X), X)
