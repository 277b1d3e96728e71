"""Other forms of the operators in the reference equal their definitions: matrices, scans and running sums."""

import loops
import numpy as np
import pytest
from tolerances import assert_close

from hyena_jax.reference import aft, attention, convolution, recurrence


@pytest.mark.parametrize("length", [1, 2, 7, 16, 37])
def test_doubling_scan(length):
    rng = np.random.default_rng(length)
    a, x = rng.uniform(-1, 1, (length, 3)), rng.normal(size=(length, 3))
    rounds = loops.doubling_scan(a, x)
    expected, _ = recurrence.linear_recurrence(a[None], x[None], np.zeros((1, 3)))
    assert_close(rounds[-1], expected[0])
    assert len(rounds) == 1 + int(np.ceil(np.log2(length)))


@pytest.mark.parametrize("is_residual", [False, True])
def test_hyena_matrix(is_residual):
    rng = np.random.default_rng(0)
    gates, h = rng.normal(size=(2, 3, 7))
    skip, v = rng.normal(size=3), rng.normal(size=7)
    expected = v[None, None]
    for n in range(3):
        step = gates[n] * convolution.long_conv(expected, h[n : n + 1], skip[n : n + 1])
        expected = expected + step if is_residual else step
    matrix = loops.hyena_matrix(gates, h, skip, is_residual)
    assert_close(matrix @ v, expected[0, 0])
    assert (np.triu(matrix, 1) == 0).all()


@pytest.mark.parametrize("p", [1, 2, 3])
def test_features(p):
    """Their products are the polynomial."""
    rng = np.random.default_rng(p)
    q, k = rng.normal(size=(2, 3))
    f = 1 + q @ k + (p >= 2) * (q @ k) ** 2 / 2 + (p >= 3) * (q @ k) ** 3 / 6
    phi = loops.features(q, p)
    assert phi.shape == (sum(3**degree for degree in range(p + 1)),)
    assert_close(np.array([phi @ loops.features(k, p)]), [f])


def test_running_sums_of_fastmax():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 11, 4))
    o = attention.fastmax(*(x[None, :, None] for x in (q, k, v)), 2, np.zeros((1, 11)), True, 0.0)
    assert_close(loops.running_sums(q, k, v, 2), o[0, :, 0])


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_running_sums_of_aft(scale):
    """Also with keys whose exponentials overflow."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 11, 4))
    k = scale * k
    expected = aft.aft(q[None], k[None], v[None], np.zeros((4, 11, 11)), np.zeros((1, 11)))
    assert_close(loops.simple(q, k, v), expected[0])
