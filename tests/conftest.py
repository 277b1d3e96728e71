"""Before JAX starts: four CPU devices, and one cache for what all test processes compile."""

import os
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers inherit the controller's
    _cache = tempfile.TemporaryDirectory(prefix="hyena_jax_tests_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import pytest

SHAKESPEARE = Path(__file__).parents[2] / "shared" / "data" / "tiny_shakespeare" / "input.txt"


@pytest.fixture
def shakespeare() -> Path:
    if not SHAKESPEARE.exists():
        pytest.skip(f"needs {SHAKESPEARE}")
    return SHAKESPEARE
