"""Tolerances by dtype, relative to the largest expected magnitude."""

import numpy as np

TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 3e-2}
# Central differences of a float64 function with step 1e-6 are accurate to about 1e-9 of its values.
DIFFERENCE_TOLERANCE = 1e-6


def assert_close(actual, expected, dtype: str | None = None) -> None:
    """Asserts that arrays are equal within the tolerance of `dtype` (that of `actual` by default)."""
    actual_array = np.asarray(actual)
    tolerance = TOLERANCE[dtype or str(actual_array.dtype)]
    expected = np.asarray(expected, np.float64)
    scale = max(np.abs(expected).max(initial=0.0), 1e-30)
    np.testing.assert_allclose(actual_array.astype(np.float64), expected, rtol=0, atol=tolerance * scale)
