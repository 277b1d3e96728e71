from functools import partial
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from grid import in_wide
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close

from hyena_jax.ops import fastmax
from hyena_jax.reference import attention as reference

WIDTH = 3
properties = settings(max_examples=20, deadline=None, derandomize=True)


def arrays(length: int, scale: float = 1.0, seed: int = 0, dtype=np.float32):
    rng = np.random.default_rng((length, seed))
    return tuple((scale * rng.standard_normal((2, length, 2, WIDTH))).astype(dtype) for _ in range(3))


def causal_mask(length: int):
    return jnp.tril(jnp.ones((length, length), bool))


@partial(jax.jit, static_argnames=("p", "causal"))
def quadratic(q, k, v, p, causal):
    return fastmax.fastmax_quadratic(q, k, v, p, causal_mask(q.shape[1]) if causal else None)


@partial(jax.jit, static_argnames=("p", "causal"))
def factorized(q, k, v, p, causal):
    if causal:
        return fastmax.fastmax_causal(q, k, v, p, fastmax.no_sums(k, p))[0]
    return fastmax.fastmax_bidirectional(q, k, v, p)


@pytest.mark.parametrize("p", [2, 3, *in_wide(1, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_both_forms_equal_the_definition(p, causal, monkeypatch):
    """Over several chunks, the last one not full."""
    monkeypatch.setattr(fastmax, "CHUNK", 4)
    q, k, v = arrays(13, scale=0.4)
    expected = reference.fastmax(q, k, v, p, np.zeros((2, 13)), causal, fastmax.LEAST_WEIGHT)
    assert_close(quadratic(q, k, v, p, causal), expected)
    assert_close(factorized(q, k, v, p, causal), expected)


@pytest.mark.grid
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("p", [2, 3])
def test_derivatives_in_both_modes(p, causal, monkeypatch):
    """Over several chunks, the last one not full."""
    monkeypatch.setattr(fastmax, "CHUNK", 4)
    with jax.enable_x64(True):
        form = factorized.__wrapped__  # do not reuse programs compiled for other chunks
        check_modes(lambda args: form(*args, p, causal), arrays(7, 0.4), is_thorough=p == 3)


features = jax.jit(fastmax.features, static_argnums=1)
kernel = jax.jit(fastmax.kernel, static_argnums=1)


@properties
@given(st.integers(1, 4), st.floats(0.1, 3.0), st.integers(0, 2**31))
def test_products_of_features_are_the_kernel(p, scale, seed):
    with jax.enable_x64(True):
        q, k = (a[0, :, 0] for a in arrays(7, scale, seed, np.float64)[:2])
        phi_q, phi_k = np.asarray(features(q, p)), np.asarray(features(k, p))
        assert phi_q.shape == (7, comb(WIDTH + p, p))
        assert_close(phi_q @ phi_k.T, kernel(q @ k.T, p))


def test_features_are_laid_out_as_documented():
    phi = features(np.float32([2, 3, 5]), 2)
    half = np.sqrt(0.5)
    np.testing.assert_allclose(phi, [1, 2, 3, 5, 4 * half, 6, 10, 9 * half, 15, 25 * half], rtol=1e-6)


@pytest.mark.parametrize("weight", [0.0, 1e-9, -1e-9])
def test_vanishing_sums_of_weights_are_kept_off_zero(weight):
    """p = 1 and one key with q . k = weight - 1."""
    q = np.full((1, 1, 1, 1), weight - 1, np.float32)
    one = np.ones((1, 1, 1, 1), np.float32)
    run = jax.jit(jax.value_and_grad(lambda *a: factorized(*a, 1, True).sum(), (0, 1, 2)))
    value, grads = run(q, one, one)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves((value, grads)))
    sums = np.array(fastmax.guarded(jnp.array([0.0, 1e-9, -1e-9, 2.0, -2.0])))
    np.testing.assert_allclose(sums, np.array([1, 1, -1, 2e3, -2e3]) * fastmax.LEAST_WEIGHT, rtol=1e-6)


def test_standardization_sees_one_token_alone():
    x = arrays(7)[0]
    standardize = jax.jit(fastmax.standardize)
    standard = np.asarray(standardize(x))
    assert_close(standard, reference.standardize(np.float64(x), fastmax.STANDARDIZE_EPS))
    np.testing.assert_array_equal(standardize(x[:, 3:4]), standard[:, 3:4])
    gradient = jax.jit(jax.grad(lambda x: fastmax.standardize(x)[..., 0].sum()))
    assert np.isfinite(gradient(np.ones((2, WIDTH), np.float32))).all()


def test_features_of_a_whole_sequence_never_exist():
    """At 64 chunks, the gradient needs less temporary memory than one array [B, L, H, M]."""
    length, width = 64 * fastmax.CHUNK, 8
    q = jax.ShapeDtypeStruct((1, length, 1, width), jnp.float32)
    gradient = jax.jit(jax.grad(lambda q, k, v: factorized(q, k, v, 3, True).sum(), (0, 1, 2)))
    used = gradient.lower(q, q, q).compile().memory_analysis().temp_size_in_bytes
    assert used < 4 * length * comb(width + 3, 3) / 1.5
