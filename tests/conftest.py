"""Before JAX starts: four CPU devices, quick compilation, and one cache of what all processes compile.

HYENA_JAX_TESTS_XLA=default compiles as XLA does by default.
"""

import importlib.metadata
import os
import signal
import tempfile
from pathlib import Path

if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers inherit the controller's
    _flags = ["--xla_force_host_platform_device_count=4"]
    # The tests compile much and run it on little: machine code that is not optimised takes half the time.
    if os.environ.get("HYENA_JAX_TESTS_XLA") != "default":
        _flags.append("--xla_backend_optimization_level=0")
        if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know this flag
            _flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([*_flags, os.environ.get("XLA_FLAGS", "")])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    _cache = tempfile.TemporaryDirectory(prefix="hyena_jax_tests_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import pytest

# nohup, and a shell that runs the tests in the background, have signals ignored that tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

MOST_MAPS = 20_000  # a third of what Linux grants: a module adds less than another third
SHAKESPEARE = Path(__file__).parents[2] / "shared" / "data" / "tiny_shakespeare" / "input.txt"


@pytest.fixture
def shakespeare() -> Path:
    if not SHAKESPEARE.exists():
        pytest.skip(f"needs {SHAKESPEARE}")
    return SHAKESPEARE


@pytest.fixture
def own_parts(monkeypatch) -> None:
    """Parts that a test registers are forgotten after the test."""
    from hyena_jax.config import REGISTRIES

    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_parts", dict(registry.parts))


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs():
    """Each program that JAX keeps takes memory maps, of which Linux grants a process 65,530.

    Beyond that the compiler aborts. The cache on disk keeps what a later module compiles again.
    """
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > MOST_MAPS:
        import jax

        jax.clear_caches()
