"""What is written for another project is read back as it was, and lies there as that project reads it."""

import numpy as np
import pytest

from hyena_jax.interop import transforms

X = np.random.default_rng(0).standard_normal((6, 1, 5)).astype(np.float32)
POLES = -np.exp(X[:, 0, :3, None])


@pytest.mark.parametrize(
    ("transform", "theirs", "ours"),
    [
        (transforms.transposed("x"), [X[:, 0]], X[:, 0].T),
        (transforms.columns(("x", "y"), (6, 2)), [X[:, 0], X[:2, 0]], np.vstack([X[:, 0], X[:2, 0]]).T),
        (transforms.joined(("x", "y"), (6, 2)), [X, X[:2]], np.concatenate([X, X[:2]])),
        (transforms.reshaped("x", (6, 1, 5), (3, 10)), [X], X.reshape(3, 10)),
        (transforms.taps("x"), [X], np.flip(X[:, 0], 1)),
        (transforms.filter_taps("x", is_reversed=False), [X], X[None, :, 0]),
        (transforms.filter_taps("x", is_reversed=True), [X], np.flip(X[None, :, 0], 2)),
        (transforms.less_one("x"), [X], X - np.float32(1)),
        (transforms.log_rates("x"), [POLES], np.log(-POLES[None, ..., 0])),
    ],
)
def test_written_is_what_was_read(transform, theirs, ours):
    _, read, write = transform
    np.testing.assert_allclose(read(*theirs), ours, rtol=1e-6)
    for found, expected in zip(write(read(*theirs)), theirs, strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_poles_that_grow_have_no_logarithm():
    assert np.isnan(transforms.log_rates("x").read(-POLES)).all()
