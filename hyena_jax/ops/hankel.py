"""Hankel operators of impulse responses, and recurrences derived from them, in float64 NumPy.

Axes: C channels, T taps, m rows, k leading singular values.

The Hankel matrix of taps g_0 .. g_{T-1} is H_ij = g_{i+j}, m x m with m = floor(T/2). Its rank is the order
of the smallest recurrence that gives these taps, and its singular values, the magnitudes of its eigenvalues,
say how close a smaller one comes. The functions here work on either of two versions of the taps:

- the taps alone: a model of length Lmax reads no other taps, so this version decides;
- the taps followed by T + 1 zeros (`continued`): the Hankel operator of the filter as a system whose response
  ends there. The bound of balanced truncation holds for it, but is large if the filter has not decayed.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

# Up to this many rows a dense matrix is decomposed; beyond, a random subspace multiplied by FFT.
DENSE_ROWS = 512
OVERSAMPLING = 10
POWER_ITERATIONS = 3
# Singular values below this fraction of the largest are rounding errors.
RANK_TOLERANCE = 1e-13
# Bytes of the largest array of a group of channels.
GROUP_BYTES = 64 * 2**20


class Spectrum(NamedTuple):
    """Leading singular values [C, k], largest first, and the others' sum of squares [C] and number."""

    values: np.ndarray
    rest_square: np.ndarray
    n_rest: int

    def tail(self, order: int) -> np.ndarray:
        """Sum [C] of the singular values beyond `order` <= k, with an upper bound for the unknown ones."""
        return self.values[:, order:].sum(1) + np.sqrt(self.n_rest * self.rest_square)

    def tail_square(self, order: int) -> np.ndarray:
        """Sum of squares [C] of the singular values beyond `order` <= k."""
        return np.square(self.values[:, order:]).sum(1) + self.rest_square


def continued(taps: np.ndarray) -> np.ndarray:
    """Taps [C, T] padded with zeros to [C, 2T + 1], so that their T x T Hankel matrix holds every tap."""
    return np.pad(taps, [(0, 0), (0, taps.shape[1] + 1)])


def least_error(spectrum: Spectrum, n_taps: int, order: int) -> np.ndarray:
    """A lower bound [C] on the L2 error over `n_taps` taps of any recurrence of this order.

    By Eckart and Young the Hankel matrix of the error has at least the Frobenius norm of the tail, and each
    tap occurs in it at most m times. `spectrum` is computed from the taps alone.
    """
    return np.sqrt(spectrum.tail_square(order) / max(n_taps // 2, 1))


def balanced_bound(spectrum: Spectrum, order: int) -> np.ndarray:
    """An upper bound [C] on the L2 error of the balanced truncation to this order: twice the tail.

    `spectrum` is computed from the continued taps. The theorem bounds the error's gain at every frequency,
    and the L2 norm of the error is the root mean square of the gain over frequencies.
    """
    return 2 * spectrum.tail(order)


def spectrum(taps: np.ndarray, n_values: int, seed: int = 0) -> Spectrum:
    """Singular values of the Hankel matrix of taps [C, T]: all, or n_values beyond `DENSE_ROWS` rows."""
    n_rows = taps.shape[1] // 2

    def of_group(group: np.ndarray) -> tuple[np.ndarray]:
        if n_rows <= DENSE_ROWS:
            magnitudes = np.abs(np.linalg.eigvalsh(dense(group, n_rows)))
            return (-np.sort(-magnitudes, axis=1),)
        return (np.abs(leading(group, n_values, seed)[0]),)

    (values,) = in_groups(of_group, taps, 8 * n_rows * min(n_rows, 4 * (n_values + OVERSAMPLING)))
    n_rest = n_rows - values.shape[1]
    # In the squared Frobenius norm, tap t occurs min(t + 1, 2m - 1 - t) times.
    times = n_rows - np.abs(np.arange(2 * n_rows - 1) - (n_rows - 1))
    rest = np.square(taps[:, : 2 * n_rows - 1]) @ times - np.square(values).sum(1)
    return Spectrum(values, np.maximum(rest, 0) if n_rest else np.zeros(len(taps)), n_rest)


def realization(taps: np.ndarray, order: int, seed: int = 0) -> np.ndarray:
    """State matrices A [C, k, k], k = min(order, m), of recurrences near taps [C, T] (Ho and Kalman 1966).

    A = S^-1/2 U^T H' V S^-1/2, with U S V^T the leading part of H and H' the Hankel matrix from tap 1. For
    the continued taps A is the balanced truncation, hence stable. Its leading n x n block has order n.
    """
    eigenvalues, u = leading(taps, order, seed)
    s = np.abs(eigenvalues)
    known = s > RANK_TOLERANCE * s[:, :1]
    root = np.where(known, 1 / np.sqrt(np.where(known, s, 1)), 0)
    a = u.swapaxes(1, 2) @ product(taps[:, 1:], u * np.sign(eigenvalues)[:, None])
    return root[:, :, None] * a * root[:, None]


def leading(taps: np.ndarray, n_values: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues [C, k], largest magnitude first, and eigenvectors [C, m, k] of the Hankel matrix of taps.

    Beyond `DENSE_ROWS` rows by subspace iteration (Halko et al. 2011, arXiv 0909.4061, algorithm 4.4).
    """
    n_rows = taps.shape[1] // 2
    if n_rows <= DENSE_ROWS:
        eigenvalues, vectors = np.linalg.eigh(dense(taps, n_rows))
    else:
        width = min(n_values + OVERSAMPLING, n_rows)
        start = np.random.default_rng(seed).standard_normal((n_rows, width))
        q = np.linalg.qr(product(taps, np.broadcast_to(start, (len(taps), *start.shape))))[0]
        for _ in range(POWER_ITERATIONS):
            q = np.linalg.qr(product(taps, q))[0]
        inner = q.swapaxes(1, 2) @ product(taps, q)
        eigenvalues, within = np.linalg.eigh((inner + inner.swapaxes(1, 2)) / 2)
        vectors = q @ within
    order = np.argsort(-np.abs(eigenvalues), axis=1)[:, :n_values]
    return np.take_along_axis(eigenvalues, order, 1), np.take_along_axis(vectors, order[:, None], 2)


def product(taps: np.ndarray, x: np.ndarray) -> np.ndarray:
    """H x [C, m, k] of the m x m Hankel matrices of taps [C, >= 2m - 1], and x [C, m, k], by FFT."""
    n_rows = x.shape[1]
    size = 1 << (2 * n_rows - 2).bit_length()
    spectra = np.fft.rfft(taps[:, : 2 * n_rows - 1], size)[..., None]
    return np.fft.irfft(spectra * np.fft.rfft(x, size, axis=1).conj(), size, axis=1)[:, :n_rows]


def dense(taps: np.ndarray, n_rows: int) -> np.ndarray:
    """The Hankel matrices [C, m, m] of taps [C, >= 2m - 1]."""
    row = np.arange(n_rows)
    return taps[:, row[:, None] + row]


def in_groups(
    function: Callable[[np.ndarray], tuple[np.ndarray, ...]], taps: np.ndarray, channel_bytes: int
) -> list[np.ndarray]:
    """`function` of taps [C, T], computed on groups of channels that fit in memory, on all cores.

    All results have C first; `channel_bytes` is the size per channel of the largest array the function makes.
    """
    cores = os.cpu_count() or 1
    rows = max(1, min(GROUP_BYTES // max(1, channel_bytes), -(-len(taps) // cores)))
    groups = [taps[i : i + rows] for i in range(0, len(taps), rows)]
    # BLAS threads spin while they wait: on many small matrices they would take the cores from this pool.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(cores) as pool:
        return [np.concatenate(parts) for parts in zip(*pool.map(function, groups), strict=True)]
