import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from tolerances import DIFFERENCE_TOLERANCE, assert_close

from hyena_jax.models.norms import RMSNorm, make_norm
from hyena_jax.reference import models as reference

X = np.random.default_rng(0).standard_normal((2, 3, 7))
SCALE = np.random.default_rng(1).standard_normal(7)


def test_rms_norm_starts_with_factor_one_and_unit_mean_square():
    params = RMSNorm().init(jax.random.key(0), jnp.float32(X))["params"]
    np.testing.assert_array_equal(params["scale"], np.zeros(7))
    y = RMSNorm().apply({"params": params}, jnp.float32(1e3 * X))
    assert_close(jnp.square(y).mean(-1), np.ones((2, 3)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rms_norm_equals_its_oracle(dtype):
    with jax.enable_x64(dtype == "float64"):
        y = RMSNorm().apply({"params": {"scale": jnp.asarray(SCALE, dtype)}}, jnp.asarray(X, dtype))
    assert y.dtype == dtype
    assert_close(y, reference.norm({"scale": SCALE}, X, "rms"))


def test_rms_norm_gradients_equal_central_differences_of_the_oracle():
    weight, direction = np.random.default_rng(2).standard_normal((2, *X.shape))

    def oracle(x):
        return (weight * reference.norm({"scale": SCALE}, x, "rms")).sum()

    with jax.enable_x64(True):
        params = {"scale": jnp.asarray(SCALE)}
        grad = jax.grad(lambda x: (weight * RMSNorm().apply({"params": params}, x)).sum())(jnp.asarray(X))
        grad = np.asarray(grad)
    expected = (oracle(X + 1e-6 * direction) - oracle(X - 1e-6 * direction)) / 2e-6
    assert np.sum(grad * direction) == pytest.approx(expected, rel=DIFFERENCE_TOLERANCE)


@pytest.mark.parametrize("name", ["layer", "rms", "none"])
def test_derivatives_in_both_modes(name):
    with jax.enable_x64(True):
        norm = make_norm(name, None)
        if name == "none":
            check_modes(norm, X, is_thorough=True)
        else:
            params = norm.init(jax.random.key(0), X)
            check_modes(lambda args: norm.apply(*args), (params, X), is_thorough=True)


@jax.jit
def value_and_gradient(x):
    return jax.value_and_grad(lambda x: RMSNorm().apply({"params": {"scale": jnp.zeros(7)}}, x).sum())(x)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e18])
def test_rms_norm_is_finite_at_extremes(size):
    y, grad = value_and_gradient(np.float32(size * X))
    assert np.isfinite(y)
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_statistics_of_bfloat16_are_float32(name):
    x = jnp.asarray(300 + X, jnp.bfloat16)
    norm = make_norm(name, jnp.bfloat16)
    params = norm.init(jax.random.key(0), x)["params"]
    y = norm.apply({"params": params}, x)
    assert y.dtype == jnp.bfloat16
    assert_close(y, reference.norm(jax.device_get(params), np.float64(x), name))


def test_no_norm_is_the_identity():
    np.testing.assert_array_equal(make_norm("none", None)(X), X)
