"""Rows as a user may have them: arrays, and a random-access source of the same rows."""

import numpy as np

RNG = np.random.default_rng(0)
WINDOWS = RNG.integers(0, 9, (20, 6))
WEIGHTS = (RNG.random((20, 5)) > 0.5).astype(float)
ARRAYS = {"inputs": WINDOWS[:, :-1], "targets": WINDOWS[:, 1:], "weights": WEIGHTS}


class Source:
    """The rows of ARRAYS, of which row 7 has these changes."""

    def __init__(self, n: int = 20, **changes):
        self.n, self.changes = n, changes

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if not 0 <= i < self.n:
            raise IndexError(i)
        return {name: values[i] for name, values in ARRAYS.items()} | (self.changes if i == 7 else {})


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(a[name], b[name])


def joined(batches):
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
