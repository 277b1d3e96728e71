"""The discrete Fourier transform: by its definition, and fast, with every operation counted.

Axes: n points in time and n frequencies, always the last axis of `dft` and the only one of the others.
"""

from typing import NamedTuple

import numpy as np


class Operations(NamedTuple):
    """Complex multiplications and additions; a factor of 1 counts, too."""

    multiplications: int
    additions: int


def dft(x: np.ndarray) -> np.ndarray:
    """X_k = sum_t x_t e^{-2 pi i k t / n}, complex [..., n] for x [..., n]."""
    n = np.shape(x)[-1]
    t = np.arange(n)
    return np.stack([np.sum(x * np.exp(-2j * np.pi * k * t / n), axis=-1) for k in range(n)], axis=-1)


def inverse_dft(spectrum: np.ndarray) -> np.ndarray:
    """x_t = (1/n) sum_k X_k e^{2 pi i k t / n}, complex [..., n] for X [..., n]."""
    n = np.shape(spectrum)[-1]
    k = np.arange(n)
    return np.stack(
        [np.sum(spectrum * np.exp(2j * np.pi * k * t / n), axis=-1) / n for t in range(n)], axis=-1
    )


def dft_operations(n: int) -> Operations:
    """The operations of `dft` with n points: n products and n - 1 sums for each frequency."""
    return Operations(n * n, n * (n - 1))


def fft(x: np.ndarray) -> tuple[np.ndarray, Operations]:
    """The DFT of x [n], n a power of two, and its operations (Cooley and Tukey 1965, radix 2).

    With E and O the DFTs of the even and odd samples, and w = e^{-2 pi i / n}: X_k = E_k + w^k O_k and
    X_{k + n/2} = E_k - w^k O_k for k < n/2.
    """
    x = np.asarray(x, complex)
    n = len(x)
    if n & (n - 1) or n == 0:
        raise ValueError(f"x must have a power of two of points, got {n}")
    if n == 1:
        return x, Operations(0, 0)
    even, of_even = fft(x[0::2])
    odd, of_odd = fft(x[1::2])
    turned = np.exp(-2j * np.pi * np.arange(n // 2) / n) * odd  # n/2 multiplications
    spectrum = np.concatenate([even + turned, even - turned])  # n additions
    return spectrum, Operations(
        of_even.multiplications + of_odd.multiplications + n // 2,
        of_even.additions + of_odd.additions + n,
    )


def real_fft(x: np.ndarray) -> tuple[np.ndarray, Operations]:
    """Frequencies 0 .. n/2 of the DFT of real x [n], n >= 2 a power of two, by one FFT of n/2 points.

    Z is the DFT of z_t = x_{2t} + i x_{2t+1}. The DFTs of the even and odd samples are its symmetric parts,
    E_k = (Z_k + conj Z_{-k}) / 2 and O_k = (Z_k - conj Z_{-k}) / 2i, indices modulo n/2.
    """
    x = np.asarray(x, np.float64)
    half = len(x) // 2
    z, (multiplications, additions) = fft(x[0::2] + 1j * x[1::2])
    mirrored = np.conj(np.roll(z[::-1], 1))  # conj Z_{-k}
    even, odd = (z + mirrored) / 2, (z - mirrored) / 2j
    turned = np.exp(-2j * np.pi * np.arange(half) / len(x)) * odd
    spectrum = np.concatenate([even + turned, even[:1] - odd[:1]])
    return spectrum, Operations(multiplications + half, additions + 2 * half + half + 1)
