"""Tolerances by dtype, relative to the largest expected magnitude."""

import os

import numpy as np

# Those of GPUs and TPUs, which emulate float64, are not measured yet.
ON_DEVICES = {
    "cpu": {"float64": 1e-11, "float32": 2e-5, "bfloat16": 3e-2},
    "gpu": {"float64": 1e-11, "float32": 5e-5, "bfloat16": 3e-2},
    "tpu": {"float64": 1e-8, "float32": 1e-4, "bfloat16": 3e-2},
}
TOLERANCE = ON_DEVICES[os.environ.get("HYENA_JAX_TESTS_PLATFORM", "cpu")]
# Central differences of a float64 function with step 1e-6 are accurate to about 1e-9 of its values.
DIFFERENCE_TOLERANCE = 1e-6


def assert_close(actual, expected, dtype: str | None = None) -> None:
    """Asserts that arrays are equal within the tolerance of `dtype` (that of `actual` by default)."""
    actual_array = np.asarray(actual)
    tolerance = TOLERANCE[dtype or str(actual_array.dtype)]
    expected = np.asarray(expected, np.float64)
    scale = max(np.abs(expected).max(initial=0.0), 1e-30)
    np.testing.assert_allclose(actual_array.astype(np.float64), expected, rtol=0, atol=tolerance * scale)
