"""Convolutions: by their definitions, and computed one token at a time.

Axes: B batch, D channels, L length, K taps, n modes.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


def long_conv(u: np.ndarray, h: np.ndarray, skip: np.ndarray) -> np.ndarray:
    """y_t = sum_{s=0..t} h_s u_{t-s} + skip u_t for u [B, D, L], h [D, L], skip [D]."""
    u, h, skip = (np.asarray(a, np.float64) for a in (u, h, skip))
    y = np.zeros_like(u)
    for t in range(u.shape[-1]):
        for s in range(t + 1):
            y[:, :, t] += h[:, s] * u[:, :, t - s]
        y[:, :, t] += skip * u[:, :, t]
    return y


def short_conv(
    x: np.ndarray, taps: np.ndarray, bias: np.ndarray, segment_ids: np.ndarray | None = None
) -> np.ndarray:
    """y_t = bias + sum_{k=0..K-1} taps_k x_{t-k}, with x = 0 before t=0 and outside the segment of t.

    x [B, D, L], taps [D, K], bias [D], segment_ids [B, L].
    """
    x, taps, bias = (np.asarray(a, np.float64) for a in (x, taps, bias))
    batch, _, length = x.shape
    if segment_ids is None:
        segment_ids = np.zeros((batch, length))
    y = np.zeros_like(x)
    for b in range(batch):
        for t in range(length):
            y[b, :, t] = bias
            for k in range(min(taps.shape[-1], t + 1)):
                if segment_ids[b, t - k] == segment_ids[b, t]:
                    y[b, :, t] += taps[:, k] * x[b, :, t - k]
    return y


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
