"""Four CPU devices for every test, made before JAX starts."""

import os
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest

SHAKESPEARE = Path(__file__).parents[2] / "shared" / "data" / "tiny_shakespeare" / "input.txt"


@pytest.fixture
def shakespeare() -> Path:
    if not SHAKESPEARE.exists():
        pytest.skip(f"needs {SHAKESPEARE}")
    return SHAKESPEARE
