"""Convolutions, correlations and transforms of the reference against NumPy's and SciPy's."""

import loops
import numpy as np
import pytest
from tolerances import assert_close


@pytest.mark.parametrize(("length", "taps"), [(1, 1), (7, 3), (3, 11)])
def test_linear_convolution_and_cross_correlation(length, taps):
    rng = np.random.default_rng(length)
    u, h = rng.normal(size=length), rng.normal(size=taps)
    assert_close(loops.linear_convolution(u, h), np.convolve(u, h))
    assert_close(loops.cross_correlation(u, h), np.correlate(u, h, "full"))


@pytest.mark.parametrize("n", [1, 7, 12])
def test_wrapped_convolutions(n):
    """Products of polynomials modulo x^n - 1, and modulo x^n - i by weights w^t with w^n = i."""
    rng = np.random.default_rng(n)
    u, h = rng.normal(size=n), rng.normal(size=n)
    assert_close(
        loops.circular_convolution(u, h), np.fft.irfft(np.fft.rfft(u) * np.fft.rfft(h), n), "float64"
    )
    w = np.exp(0.5j * np.pi * np.arange(n) / n)
    y = np.fft.ifft(np.fft.fft(w * u) * np.fft.fft(w * h)) / w
    np.testing.assert_allclose(loops.wrapped_convolution(u, h, 1j), y, atol=1e-12)
    assert_close(y.real, np.convolve(u, h)[:n])
    assert_close(
        loops.wrapped_convolution(u, h, -1.0),
        np.convolve(u, h)[:n] - np.append(np.convolve(u, h)[n:], 0),
    )


@pytest.mark.parametrize("length", [1, 2, 13, 32, 37])
def test_online_convolution(length):
    """Inputs that depend on outputs; every input meets every later output in exactly one tile."""
    h = np.random.default_rng(length).normal(size=length)
    u, y, tiles = loops.online_convolution(h, 1.0, lambda y: np.cos(3 * y))
    assert_close(u[1:], np.cos(3 * y[:-1]))
    assert_close(y, np.convolve(u, h)[:length])
    covered = np.eye(length, dtype=int)
    for tile in tiles:
        covered[tile.last : tile.end, tile.first : tile.last] += 1
    np.testing.assert_array_equal(covered, np.tri(length, dtype=int))


def test_modal_convolution():
    rng = np.random.default_rng(0)
    u, residue = rng.normal(size=19), rng.normal(size=3) + 1j * rng.normal(size=3)
    mode = 0.9 * np.exp(1j * np.array([0.1, 1.0, 2.0]))
    taps = (residue[:, None] * mode[:, None] ** np.arange(18)).real.sum(0)
    h = np.append(0.7, taps)
    assert_close(loops.modal_convolution(u, 0.7, residue, mode), np.convolve(u, h)[:19])


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_dft_and_inverse(n):
    rng = np.random.default_rng(n)
    x = rng.normal(size=(3, n)) + 1j * rng.normal(size=(3, n))
    np.testing.assert_allclose(loops.dft(x), np.fft.fft(x), atol=1e-12)
    np.testing.assert_allclose(loops.inverse_dft(x), np.fft.ifft(x), atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 4, 64])
def test_fft_and_its_operations(n):
    rng = np.random.default_rng(n)
    x = rng.normal(size=n) + 1j * rng.normal(size=n)
    spectrum, operations = loops.fft(x)
    np.testing.assert_allclose(spectrum, np.fft.fft(x), atol=1e-12)
    rounds = n.bit_length() - 1
    assert operations == (n // 2 * rounds, n * rounds)


@pytest.mark.parametrize("n", [0, 3, 12])
def test_fft_refuses_other_lengths(n):
    with pytest.raises(ValueError, match=f"power of two of points, got {n}"):
        loops.fft(np.zeros(n))


@pytest.mark.parametrize("n", [2, 4, 64])
def test_real_fft(n):
    x = np.random.default_rng(n).normal(size=n)
    spectrum, operations = loops.real_fft(x)
    np.testing.assert_allclose(spectrum, np.fft.rfft(x), atol=1e-12)
    if n == 64:
        assert sum(operations) < 0.8 * sum(loops.fft(x)[1])


def test_operations_of_the_definition():
    """Its sums have n products and n - 1 additions each."""
    assert loops.dft_operations(8) == (64, 56)
    assert_close(np.array(loops.dft_operations(1), np.float64), [1, 0])
