"""Convolutions computed one token at a time. Axes: L length, n modes."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


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
