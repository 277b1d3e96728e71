"""Hankel matrices against loops and dense SVDs, and the two bounds from their singular values."""

import numpy as np
import pytest
from distillation.systems import decaying_noise, noise, oscillations

from hyena_jax.ops import hankel


@pytest.mark.parametrize("n_taps", [2, 3, 10, 31, 64])
def test_singular_values_are_those_of_the_matrix_written_out(n_taps):
    taps, n_rows = noise(2, n_taps), n_taps // 2
    matrices = np.array([[[g[i + j] for j in range(n_rows)] for i in range(n_rows)] for g in taps])
    expected = np.linalg.svd(matrices, compute_uv=False)
    found = hankel.spectrum(taps, n_rows)
    np.testing.assert_allclose(found.values, expected, atol=1e-12)
    np.testing.assert_allclose(found.tail(1), expected[:, 1:].sum(1), atol=1e-12)
    np.testing.assert_allclose(found.tail_square(1), np.square(expected[:, 1:]).sum(1), atol=1e-12)


def test_products_by_fft():
    taps, x = noise(3, 26), noise(3, 13 * 4, 1).reshape(3, 13, 4)
    np.testing.assert_allclose(hankel.product(taps, x), hankel.dense(taps, 13) @ x, atol=1e-12)


def test_a_random_subspace_finds_what_the_dense_matrix_has(monkeypatch):
    taps = decaying_noise(3, 121, 0.15)
    dense = hankel.spectrum(taps, 20)
    monkeypatch.setattr(hankel, "DENSE_ROWS", 8)
    found = hankel.spectrum(taps, 20)
    assert found.values.shape == (3, 20)
    assert found.n_rest == 40
    np.testing.assert_allclose(found.values[:, :12], dense.values[:, :12], rtol=1e-6)
    for order in (4, 12):
        np.testing.assert_allclose(found.tail_square(order), dense.tail_square(order), rtol=1e-3)
        assert (found.tail(order) >= dense.tail(order)).all()


@pytest.mark.parametrize("order", [2, 5, 8])
def test_balanced_truncation_is_stable_and_within_its_bound(order):
    taps = decaying_noise(4, 48, 0.1)
    continued = hankel.continued(taps)
    poles = np.linalg.eigvals(hankel.realization(continued, order))
    assert (np.abs(poles) < 1).all()
    bound = hankel.balanced_bound(hankel.spectrum(continued, 48), order)
    values = np.linalg.svd(hankel.dense(continued, 48), compute_uv=False)
    np.testing.assert_allclose(bound, 2 * values[:, order:].sum(1), rtol=1e-10)
    # The best residues for its poles are at least as good as its own.
    for channel, g in enumerate(taps):
        basis = poles[channel] ** np.arange(48)[:, None]
        error = g - (basis @ np.linalg.lstsq(basis, g.astype(complex))[0]).real
        assert np.linalg.norm(error) <= bound[channel]


def test_of_the_taps_alone_a_system_is_recovered():
    poles = np.array([0.97, 0.9 * np.exp(0.7j), 0.9 * np.exp(-0.7j)])
    found = np.linalg.eigvals(hankel.realization(oscillations(list(poles[:2]), 30, 1), 3))[0]
    np.testing.assert_allclose(np.sort_complex(found), np.sort_complex(poles), atol=1e-10)
