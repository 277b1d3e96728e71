"""Documents are the runs of equal ids in a row."""

import numpy as np

from hyena_jax.ops.documents import documents


def test_runs_are_numbered_and_positions_restart():
    found = documents(np.array([[7, 7, 7, 2, 2, 7, 0], [1, 2, 3, 3, 3, 3, 3]], np.int32))
    np.testing.assert_array_equal(found.number, [[0, 0, 0, 1, 1, 2, 3], [0, 1, 2, 2, 2, 2, 2]])
    np.testing.assert_array_equal(found.position, [[0, 1, 2, 0, 1, 0, 0], [0, 0, 0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(found.changes, [[0, 0, 0, 1, 0, 1, 1], [0, 1, 1, 0, 0, 0, 0]])
