"""The tour's loops: convolutions and transforms equal NumPy's, other forms of operators their definitions."""

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


@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_transforms_and_their_operations(n):
    rng = np.random.default_rng(n)
    x = rng.normal(size=(3, n)) + 1j * rng.normal(size=(3, n))
    np.testing.assert_allclose(loops.dft(x), np.fft.fft(x), atol=1e-12)
    np.testing.assert_allclose(loops.inverse_dft(x), np.fft.ifft(x), atol=1e-12)
    assert loops.dft_operations(n) == (n**2, n * (n - 1))  # sums of n products
    if n == 7:
        with pytest.raises(ValueError, match="power of two of points, got 7"):
            loops.fft(x[0])
        return
    spectrum, operations = loops.fft(x[0])
    np.testing.assert_allclose(spectrum, np.fft.fft(x[0]), atol=1e-12)
    rounds = n.bit_length() - 1
    assert operations == (n // 2 * rounds, n * rounds)
    if n > 1:
        spectrum, fewer = loops.real_fft(x[0].real)
        np.testing.assert_allclose(spectrum, np.fft.rfft(x[0].real), atol=1e-12)
    if n == 64:
        assert sum(fewer) < 0.8 * sum(operations)
