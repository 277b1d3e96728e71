"""The order of training rows: which source and which of its windows row r is, from (seed, r) alone.

Nothing is stored, so rows are known for any number of windows, and a run continues at any row. Sources take
turns in a fixed pattern by their weights; the windows of each source are permuted anew in every epoch. NumPy
alone, over arrays of rows.

Shapes: k rows, S sources.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hyena_jax.system.errors import UserError, require

PERIOD = 1000
"""Rows after which the turns of the sources repeat: weights count in thousandths."""
ROUNDS = 8
"""Each half of an index is changed by the other one in every second round."""


@lru_cache(4096)
def drawn(*about: int) -> np.ndarray:
    """Numbers that a seed and what they are for determine, uint64 [ROUNDS + 1], by SHAKE-256."""
    numbers = np.frombuffer(hashlib.shake_256(repr(about).encode()).digest(8 * (ROUNDS + 1)), "<u8")
    return numbers.astype(np.uint64)


def permuted(indices: np.ndarray, n: int, about: tuple[int, ...]) -> np.ndarray:
    """The images int64 [k] of indices [k] under a permutation of 0 .. n - 1, 1 <= n <= 2**62.

    A Feistel network over the bits of n - 1: the bits are cut into two parts, and in turn each is changed by
    a function of the other, which a second pass could undo, so that the network is a bijection. An image
    beyond n - 1 is permuted again until it is below n (cycle walking: Black and Rogaway 2002, section 5);
    less than half of all images are.

    Args:
      about: the integers that the permutation is drawn from, such as a seed, a source and an epoch.
    """
    bits = (n - 1).bit_length()
    low_bits = (bits + 1) // 2
    shift = np.uint64(low_bits)
    low_mask, high_mask = np.uint64(2**low_bits - 1), np.uint64(2 ** (bits - low_bits) - 1)
    found = indices.astype(np.uint64)
    walking = np.arange(len(found))
    while len(walking):
        low, high = found[walking] & low_mask, found[walking] >> shift
        for i, key in enumerate(drawn(*about)[:ROUNDS]):
            if i % 2:
                high = high ^ (_mixed(low + key) & high_mask)
            else:
                low = low ^ (_mixed(high + key) & low_mask)
        found[walking] = (high << shift) | low
        walking = walking[found[walking] >= n]
    return found.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), in which every bit depends on all."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Turns(NamedTuple):
    """One period of the sources' turns."""

    source: np.ndarray
    """The source of each row of a period, int64 [PERIOD]."""
    before: np.ndarray
    """How many rows of that source come before in the period, int64 [PERIOD]."""
    counts: np.ndarray
    """Rows of each source in a period, int64 [S]."""


def turns(weights: Sequence[float], argument: str) -> Turns:
    """The turns of sources with these weights, each spread evenly; those of equal weights follow one another.

    UserError, which names `argument`, if a weight is not positive or too small for one row in a period.
    """
    require(all(weight > 0 for weight in weights), argument, tuple(weights), "numbers above 0")
    exact = np.array(weights, np.float64) / sum(weights) * PERIOD
    counts = np.floor(exact).astype(np.int64)
    largest_rest = np.argsort(counts - exact, kind="stable")
    counts[largest_rest[: PERIOD - counts.sum()]] += 1
    if counts.min() == 0:
        raise UserError(f"must each be at least a thousandth of their sum, got {tuple(weights)}", argument)
    source = np.repeat(np.arange(len(counts)), counts)
    before = np.concatenate([np.arange(count) for count in counts])
    # Row j of n is due in the middle of its n-th of the period.
    order = np.argsort((2 * before + 1) / (2 * counts[source]), kind="stable")
    return Turns(source[order], before[order], counts)


class Place(NamedTuple):
    """Where rows are read."""

    source: np.ndarray
    """int64 [k]."""
    epoch: np.ndarray
    """Of that source, int64 [k]."""
    window: np.ndarray
    """Of that source, int64 [k]."""


def places(seed: int, rows: np.ndarray, sizes: Sequence[int], taken: Turns) -> Place:
    """The source, epoch and window of each row [k]; a source has each window once in an epoch.

    `sizes` are the windows of each source, at least 1.
    """
    periods, at = np.divmod(rows.astype(np.int64), PERIOD)
    source = taken.source[at]
    before = periods * taken.counts[source] + taken.before[at]
    epoch, window = np.divmod(before, np.array(sizes, np.int64)[source])
    for i, n in enumerate(sizes):
        for current in np.unique(epoch[source == i]):
            ours = np.flatnonzero((source == i) & (epoch == current))
            window[ours] = permuted(window[ours], int(n), (seed, i, int(current)))
    return Place(source, epoch, window)
