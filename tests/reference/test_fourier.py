"""The transforms against NumPy's, and their operations against the formulas."""

import numpy as np
import pytest
from tolerances import assert_close

from hyena_jax.reference import fourier


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_dft_and_inverse(n):
    rng = np.random.default_rng(n)
    x = rng.normal(size=(3, n)) + 1j * rng.normal(size=(3, n))
    spectrum = fourier.dft(x)
    np.testing.assert_allclose(spectrum, np.fft.fft(x), atol=1e-12)
    np.testing.assert_allclose(fourier.inverse_dft(spectrum), x, atol=1e-12)
    np.testing.assert_allclose(fourier.inverse_dft(x), np.fft.ifft(x), atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 4, 64])
def test_fft_and_its_operations(n):
    rng = np.random.default_rng(n)
    x = rng.normal(size=n) + 1j * rng.normal(size=n)
    spectrum, operations = fourier.fft(x)
    np.testing.assert_allclose(spectrum, np.fft.fft(x), atol=1e-12)
    rounds = n.bit_length() - 1
    assert operations == (n // 2 * rounds, n * rounds)


@pytest.mark.parametrize("n", [0, 3, 12])
def test_fft_refuses_other_lengths(n):
    with pytest.raises(ValueError, match=f"power of two of points, got {n}"):
        fourier.fft(np.zeros(n))


@pytest.mark.parametrize("n", [2, 4, 64])
def test_real_fft(n):
    x = np.random.default_rng(n).normal(size=n)
    spectrum, operations = fourier.real_fft(x)
    np.testing.assert_allclose(spectrum, np.fft.rfft(x), atol=1e-12)
    if n == 64:
        assert sum(operations) < 0.8 * sum(fourier.fft(x)[1])


def test_operations_of_the_definition():
    """Its sums have n products and n - 1 additions each."""
    assert fourier.dft_operations(8) == (64, 56)
    assert_close(np.array(fourier.dft_operations(1), np.float64), [1, 0])
