"""Oracles of the tour alone: other forms of convolutions and recurrences, and the discrete Fourier transform.

NumPy loops in float64, as those in `hyena_jax.reference`, which the tests of mixers and filters read.

Axes: B batch, D channels, L length, K taps, n modes; of transforms, n points in time and n frequencies,
always the last axis of `dft` and the only one of the others.
"""

from collections.abc import Callable
from math import factorial
from typing import NamedTuple

import numpy as np

from hyena_jax.reference.aft import sigmoid


def linear_convolution(u: np.ndarray, h: np.ndarray) -> np.ndarray:
    """y_t = sum_s h_s u_{t-s} for t = 0 .. L+M-2, for u [L], h [M]: every sample of u starts an h."""
    u, h = (np.asarray(a, np.float64) for a in (u, h))
    y = np.zeros(len(u) + len(h) - 1)
    for t in range(len(u)):
        for s in range(len(h)):
            y[t + s] += u[t] * h[s]
    return y


def cross_correlation(u: np.ndarray, h: np.ndarray) -> np.ndarray:
    """c_t = sum_s h_s u_{t+s} for t = -(M-1) .. L-1, with u = 0 outside, for u [L] and h [M]: [L+M-1]."""
    return linear_convolution(u, np.asarray(h)[::-1])


def circular_convolution(u: np.ndarray, h: np.ndarray) -> np.ndarray:
    """y_t = sum_{s=0..n-1} h_s u_{(t-s) mod n} for u, h [n]: the past of time 0 is the end."""
    return wrapped_convolution(u, h, 1.0)


def wrapped_convolution(u: np.ndarray, h: np.ndarray, factor: complex) -> np.ndarray:
    """y_t = sum_{s<=t} h_s u_{t-s} + factor sum_{s>t} h_s u_{n+t-s} for u, h [n].

    The product of two polynomials modulo x^n - factor: circular with 1, negacyclic with -1, and with i the
    right-angle convolution (Crandall and Fagin 1994), whose real part is causal for real u and h.
    """
    n = len(u)
    y = np.zeros(n, np.result_type(u, h, factor))
    for t in range(n):
        for s in range(n):
            y[t] += h[s] * u[t - s] if s <= t else factor * h[s] * u[n + t - s]
    return y


def toeplitz(h: np.ndarray) -> np.ndarray:
    """S_h [L, L] with S_h[t, s] = h_{t-s} for s <= t, and 0 above the diagonal, for h [L]: S_h u = h * u."""
    length = len(h)
    matrix = np.zeros((length, length), np.result_type(h, np.float64))
    for t in range(length):
        for s in range(t + 1):
            matrix[t, s] = h[t - s]
    return matrix


class Tile(NamedTuple):
    """The inputs first .. last-1 were added to the outputs last .. end-1."""

    first: int
    last: int
    end: int


class Decoded(NamedTuple):
    """Inputs u [L], outputs y [L] = h * u, and the tiles in the order in which they were computed."""

    u: np.ndarray
    y: np.ndarray
    tiles: list[Tile]


def online_convolution(h: np.ndarray, first: float, respond: Callable[[float], float]) -> Decoded:
    """y = h * u for h [L] with u_0 = first and u_{t+1} = respond(y_t): no input is known before it is needed.

    After input number i, its U last inputs are added to the next U outputs, U being the largest power of two
    that divides i: each pair of an input and a later output is covered once (relaxed multiplication, van der
    Hoeven 2002; Oncescu et al. 2024, arXiv 2410.12982). Each tile is a convolution, O(U log U) by FFT.
    """
    length = len(h)
    padded = np.concatenate([h, np.zeros(length)])
    u, y, tiles = np.zeros(length), np.zeros(length), []
    u[0] = first
    for t in range(length):
        y[t] += h[0] * u[t]
        if t + 1 == length:
            break
        u[t + 1] = respond(y[t])
        i = t + 1  # inputs that have been used
        size = i & -i
        tile = Tile(i - size, i, min(i + size, length))
        later = np.convolve(u[tile.first : i], padded[1 : 2 * size])[size - 1 : 2 * size - 1]
        y[i : tile.end] += later[: tile.end - i]
        tiles.append(tile)
    return Decoded(u, y, tiles)


def modal_convolution(u: np.ndarray, lag_zero: float, residue: np.ndarray, mode: np.ndarray) -> np.ndarray:
    """y = h * u for u [L], h_0 = lag_zero and h_t = Re sum_n R_n lambda_n^{t-1}, by n complex numbers.

    residue R and mode lambda complex [n]. The output first, then the update of the state, which holds only
    earlier inputs: y_t = h_0 u_t + Re(R . x), x <- lambda x + u_t (arXiv 2310.18780).
    """
    state, y = np.zeros(len(mode), complex), np.zeros(len(u))
    for t in range(len(u)):
        y[t] = lag_zero * u[t] + (residue * state).real.sum()
        state = mode * state + u[t]
    return y


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


def doubling_scan(a: np.ndarray, x: np.ndarray) -> list[np.ndarray]:
    """h_t = a_t h_{t-1} + x_t with h_{-1} = 0, by about log2 L rounds that know no order of time.

    a, x [L, ...]. Each round composes step t with step t - n, n = 1, 2, 4, ..: first h -> a' h + x', then
    h -> a h + x, is h -> (a a') h + (a x' + x). After a round, entry t covers the last 2n inputs (Hillis and
    Steele 1986). Returns x and then the values after each round [L, ...]; the last is h.
    """
    a, x = (np.asarray(v, np.float64) for v in (a, x))
    rounds, n = [x], 1
    while n < len(x):
        x, a = (
            np.concatenate([x[:n], a[n:] * x[:-n] + x[n:]]),
            np.concatenate([a[:n], a[n:] * a[:-n]]),
        )
        rounds.append(x)
        n *= 2
    return rounds


def hyena_matrix(gates: np.ndarray, h: np.ndarray, skip: np.ndarray, is_residual: bool = False) -> np.ndarray:
    """The matrix M [L, L] of one channel, M v being the result of its N gated convolutions (section 3.2).

    M = D_N C_N .. D_1 C_1 with D_n the diagonal matrix of gate x_n and C_n = S_{h_n} + b_n I; of
    `annotated_hyena`, with its normalised gates and `is_residual`, M = (I + D_N C_N) .. (I + D_1 C_1).
    gates and h [N, L], skip [N].
    """
    identity = np.eye(gates.shape[1])
    matrix = identity
    for x_n, h_n, b_n in zip(gates, h, skip, strict=True):
        step = np.diag(x_n) @ (toeplitz(h_n) + b_n * identity)
        matrix = (identity + step if is_residual else step) @ matrix
    return matrix


def simple(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """`aft` with w = 0 for q, k, v [L, D], with a state of three numbers a channel (AFT-simple).

    The largest key so far, and the numerator and denominator over its exponential, so that none overflows.
    """
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    largest = np.full(k.shape[1], -np.inf)
    numerator, denominator = np.zeros(k.shape[1]), np.zeros(k.shape[1])
    y = np.zeros_like(v)
    for t in range(len(k)):
        before, largest = largest, np.maximum(largest, k[t])
        rescaled, weight = np.exp(before - largest), np.exp(k[t] - largest)
        numerator = rescaled * numerator + weight * v[t]
        denominator = rescaled * denominator + weight
        y[t] = numerator / denominator
    return sigmoid(q) * y


def features(x: np.ndarray, p: int) -> np.ndarray:
    """phi(x) [M] of x [d] with phi(q) . phi(k) = f(q . k): M = 1 + d + d^2 + .. + d^p.

    For each degree l all products of l entries, divided by sqrt(l!). (Products of the same entries in another
    order are equal; `hyena_jax.ops.fastmax` keeps one of them, which gives C(d+p, p) features.)
    """
    parts, products = [], np.ones(1)
    for degree in range(p + 1):
        parts.append(products / np.sqrt(factorial(degree)))
        products = np.outer(products, x).ravel()
    return np.concatenate(parts)


def running_sums(q: np.ndarray, k: np.ndarray, v: np.ndarray, p: int) -> np.ndarray:
    """The causal `fastmax` of one head, q, k, v [L, d], with a state of fixed size: no weight is computed.

    o_t = phi(q_t) S_t / phi(q_t) . z_t, S_t = sum_{s<=t} phi(k_s) v_s^T, z_t = sum_{s<=t} phi(k_s).
    """
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    n_features = len(features(q[0], p))
    sums, normaliser = np.zeros((n_features, v.shape[1])), np.zeros(n_features)
    o = np.zeros_like(v)
    for t in range(len(q)):
        key = features(k[t], p)
        sums += np.outer(key, v[t])
        normaliser += key
        query = features(q[t], p)
        o[t] = query @ sums / (query @ normaliser)
    return o
