"""The order of rows: permutations are bijections that look random, and sources keep to their shares."""

import numpy as np
import pytest

from hyena_jax.data.order import PERIOD, permuted, places, turns
from hyena_jax.system.errors import UserError


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 997, 65537])
def test_permutations_are_bijections(n):
    images = [permuted(np.arange(n), n, (seed, 0, epoch)) for seed in (0, 7) for epoch in (0, 1)]
    for image in images:
        np.testing.assert_array_equal(np.sort(image), np.arange(n))
    if n >= 64:  # each differs from the others, and from the identity, nearly everywhere
        for i, one in enumerate(images):
            for other in [np.arange(n), *images[:i]]:
                assert np.mean(one == other) < 5 / np.sqrt(n)


def chi_squared(counts):
    """Mean 1 and standard deviation sqrt(2 / (len(counts) - 1)) for numbers drawn uniformly."""
    return ((counts - counts.mean()) ** 2 / counts.mean()).sum() / (len(counts) - 1)


def test_images_spread_evenly():
    n = 30_000_000_000
    image = permuted(np.arange(100_000), n, (0, 0, 0))
    assert image.min() >= 0
    assert image.max() < n
    assert len(np.unique(image)) == len(image)
    assert abs(chi_squared(np.bincount(image * 64 // n)) - 1) < 0.6
    # So do the differences of neighbours, in both directions.
    assert abs(chi_squared(np.bincount(np.diff(image) % n * 64 // n)) - 1) < 0.6


def test_where_a_small_index_goes_is_uniform_over_seeds():
    n = 7
    firsts = np.array([permuted(np.arange(n), n, (seed, 0, 0)) for seed in range(700)])
    for column in firsts.T:
        assert abs(chi_squared(np.bincount(column, minlength=n)) - 1) < 3


@pytest.mark.parametrize("weights", [(1,), (1, 1, 1), (0.001, 0.999), (5, 3, 1.5, 0.5)])
def test_each_source_has_its_share_up_to_one_row(weights):
    taken = turns(weights, "weights")
    shares = taken.counts / PERIOD
    assert np.abs(shares - np.array(weights) / sum(weights)).max() < 1 / PERIOD
    at = places(0, np.arange(3 * PERIOD + 17), [10**9] * len(weights), taken)
    counts = np.cumsum(at.source[:, None] == np.arange(len(weights)), axis=0)
    exact = np.arange(1, len(counts) + 1)[:, None] * shares
    assert np.abs(counts - exact).max() < 1.01


def test_every_window_comes_once_an_epoch():
    sizes, turns_ = [13, 100], turns((0.2, 0.8), "weights")
    at = places(5, np.arange(5000), sizes, turns_)
    rows = np.array([4999, 0, 17, 2500])
    for alone, in_order in zip(places(5, rows, sizes, turns_), at, strict=True):
        np.testing.assert_array_equal(alone, in_order[rows])
    for i, n in enumerate(sizes):
        ours = at.source == i
        for epoch in range(at.epoch[ours].max()):  # the last one may be cut
            np.testing.assert_array_equal(np.sort(at.window[ours & (at.epoch == epoch)]), np.arange(n))
        first, second = (at.window[ours & (at.epoch == epoch)] for epoch in (0, 1))
        assert np.mean(first == second) < 0.5


def test_equal_sources_are_permuted_apart():
    at = places(5, np.arange(2000), [1000, 1000], turns((1, 1), "weights"))
    first, second = at.window[at.source == 0], at.window[at.source == 1]
    assert np.mean(first == second) < 0.01


@pytest.mark.parametrize("weights", [(0, 1), (-1, 2), (1e-6, 1)])
def test_wrong_weights_are_refused(weights):
    with pytest.raises(UserError, match=r"data.weights must .*, got \("):
        turns(weights, "data.weights")
