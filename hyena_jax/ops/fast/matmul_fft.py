"""Fourier transforms as products of matrices, for matrix units. Axes: L length, n = R C points."""

from functools import partial
from math import isqrt, sqrt

import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.ops.long_conv import Transform, spectral_conv


def matmul_fft_conv(u: jax.Array, h: jax.Array) -> jax.Array:
    """`fft_conv` with each FFT as two products with Fourier matrices of about sqrt(L) points.

    The first two of Bailey's four steps (1990); the order of frequencies does not matter here, so it is not
    restored. O(L^1.5), for matrix units: FlashFFTConv (Fu et al. 2023, arXiv 2311.05908, section 3.1).
    """
    shape = factors(u.shape[-1])
    transform = Transform(partial(_matmul_fft, shape=shape), partial(_matmul_ifft, shape=shape))
    return spectral_conv(u, h, transform, shape[0] * shape[1])


def _matmul_fft(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """FFT of x [..., R C]; frequency k C' + j of the FFT is at (j, k)."""
    rows, twiddle, columns = _fourier_matrices(shape, x.dtype)
    x = x.reshape(*x.shape[:-1], *shape)
    x = jnp.einsum("jr,...rc->...jc", rows, x, precision="highest") * twiddle
    return jnp.einsum("...jc,ck->...jk", x, columns, precision="highest").reshape(*x.shape[:-2], -1)


def _matmul_ifft(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    rows, twiddle, columns = (jnp.conj(m) for m in _fourier_matrices(shape, x.dtype))
    x = x.reshape(*x.shape[:-1], *shape)
    x = jnp.einsum("...jk,ck->...jc", x, columns, precision="highest") * twiddle
    x = jnp.einsum("jr,...jc->...rc", rows, x, precision="highest")
    return x.reshape(*x.shape[:-2], -1) / (shape[0] * shape[1])


def _fourier_matrices(shape: tuple[int, int], dtype: jnp.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """exp(-2 pi i j r / R) [R, R], exp(-2 pi i j c / R C) [R, C] and exp(-2 pi i c k / C) [C, C]."""
    n_rows, n_columns = shape
    r, c = np.arange(n_rows), np.arange(n_columns)

    def roots(products: np.ndarray, n: int) -> np.ndarray:
        return np.exp(-2j * np.pi / n * (products % n)).astype(dtype)

    twiddle = roots(np.outer(r, c), n_rows * n_columns)
    return roots(np.outer(r, r), n_rows), twiddle, roots(np.outer(c, c), n_columns)


def factors(length: int) -> tuple[int, int]:
    """R and C with R C >= length, both near sqrt(length), and as few points as that allows.

    From 1,024 on in whole tiles of a TPU: C is a multiple of 128 and R of 8.
    """
    if length < 1024:
        columns = isqrt(length - 1) + 1
        return -(-length // columns), columns
    columns = 128 * max(1, round(sqrt(length) / 128))
    return 8 * -(-length // (8 * columns)), columns
