from functools import partial
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


@partial(jax.jit, static_argnames=("p", "causal"))
def quadratic(q, k, v, p, causal):
    return fastmax.fastmax_quadratic(q, k, v, p, np.tri(q.shape[1], dtype=bool) if causal else None)


@partial(jax.jit, static_argnames=("p", "causal"))
def factorized(q, k, v, p, causal):
    if causal:
        return fastmax.fastmax_causal(q, k, v, p, fastmax.no_sums(k, p))[0]
    return fastmax.fastmax_bidirectional(q, k, v, p)


@pytest.mark.parametrize("p", [3, *in_wide(1, 2, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_both_forms_equal_the_definition_and_have_the_same_gradients(p, causal, monkeypatch):
    """Over several chunks, the last one not full."""
    monkeypatch.setattr(fastmax, "CHUNK", 4)
    q, k, v = arrays(13, scale=0.4)
    weight = arrays(13, seed=1)[0]

    @jax.jit
    def results(*args):
        pairs = [jax.vjp(lambda *args, f=f: f(*args, p, causal), *args) for f in (quadratic, factorized)]
        return [(y, pull_back(weight)) for y, pull_back in pairs]

    (plain, expected_gradients), (y, gradients) = results(q, k, v)
    expected = reference.fastmax(q, k, v, p, np.zeros((2, 13)), causal, fastmax.LEAST_WEIGHT)
    assert_close(plain, expected)
    assert_close(y, expected)
    jax.tree.map(assert_close, gradients, expected_gradients)


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


def test_vanishing_sums_of_weights_are_kept_off_zero():
    """p = 1, and in each row one key with q . k = weight - 1."""
    q = np.float32([0.0, 1e-9, -1e-9]).reshape(3, 1, 1, 1) - 1
    run = jax.jit(jax.value_and_grad(lambda *a: factorized(*a, 1, True).sum(), (0, 1, 2)))
    found = run(q, np.ones_like(q), np.ones_like(q))
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(found))
    sums = np.array(jax.jit(fastmax.guarded)(np.float32([0.0, 1e-9, -1e-9, 2.0, -2.0])))
    np.testing.assert_allclose(sums, np.array([1, 1, -1, 2e3, -2e3]) * fastmax.LEAST_WEIGHT, rtol=1e-6)


def test_standardization_sees_one_token_alone():
    x = arrays(7)[0]
    x[:, 5] = 1  # no deviation

    @jax.jit
    def results(x):
        y, pull_back = jax.vjp(fastmax.standardize, x)
        return y, *pull_back(y + 1)

    standard, gradient = results(x)
    assert_close(standard, reference.standardize(np.float64(x), fastmax.STANDARDIZE_EPS))
    x[:, 4:] = 7
    np.testing.assert_array_equal(results(x)[0][:, :4], standard[:, :4])
    assert np.isfinite(gradient).all()


def test_features_of_a_whole_sequence_never_exist():
    """At 64 chunks, the gradient needs less temporary memory than one array [B, L, H, M]."""
    length, width = 64 * fastmax.CHUNK, 8
    q = jax.ShapeDtypeStruct((1, length, 1, width), jnp.float32)
    gradient = jax.jit(jax.grad(lambda q, k, v: factorized(q, k, v, 3, True).sum(), (0, 1, 2)))
    used = gradient.lower(q, q, q).compile().memory_analysis().temp_size_in_bytes
    assert used < 4 * length * comb(width + 3, 3) / 1.5
