"""Before JAX starts: four CPU devices, and quick compilation.

HYENA_JAX_TESTS_XLA=default compiles as XLA does by default. HYENA_JAX_TESTS_PLATFORM=gpu, or tpu, runs
tests/ops, tests/mixers and tests/models on the first device there; =cpu on one CPU device, as these would.
"""

import gc
import importlib.metadata
import itertools
import os
import re
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers inherit the controller's
    _platform = os.environ.get("HYENA_JAX_TESTS_PLATFORM")
    _flags = [] if _platform else ["--xla_force_host_platform_device_count=4"]
    # The tests compile much and run it on little: machine code that is not optimised takes half the time.
    if os.environ.get("HYENA_JAX_TESTS_XLA") != "default" and _platform not in ("gpu", "tpu"):
        # One part of a program instead of up to 32 compiles in five sixths of the time.
        _flags += ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
        if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know this flag
            _flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([*_flags, os.environ.get("XLA_FLAGS", "")])
    os.environ["JAX_PLATFORMS"] = {"gpu": "cuda,cpu", "tpu": "tpu,cpu"}.get(_platform, "cpu")
    if _platform:
        os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Without the line of code of each operation, building programs takes nineteen twentieths of the time.
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    # Most programs here are so small that they compile faster than a cache on disk finds and loads them.
    os.environ["HYENA_JAX_COMPILATION_CACHE"] = "off"
    _cache = tempfile.TemporaryDirectory(prefix="hyena_jax_tests_")
    os.environ["HYENA_JAX_TESTS_CACHE"] = _cache.name

import pytest
from bucket_server import BUCKET, Proxy, reached_at, serving

# The modules and tests live as long as the process: walking them all while they are collected takes seconds.
gc.disable()

# nohup, and a shell that runs the tests in the background, have signals ignored that tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

PLATFORM = os.environ.get("HYENA_JAX_TESTS_PLATFORM")
MAX_MAPS = 30_000  # half of what Linux grants: the tests until the next count add far less than the rest
COUNT_EVERY = 16  # tests
# Files and tests of these that need several devices, or the CPU's own forms.
NEED_DEVICES = {
    *("test_shards.py", "test_layout.py", "test_sequence_layouts.py", "test_shards_count_on_every_device"),
    *(
        "test_derivatives_in_both_modes_where_ffts_are_sharded",
        "test_a_sharded_fft_moves_no_rows_between_devices",
    ),
}
NEED_PACKAGES = {"bucket", "proxy", "wheel"}  # fixtures
SHAKESPEARE = Path(__file__).parents[2] / "shared" / "data" / "tiny_shakespeare" / "input.txt"


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take minutes come first, so that others run beside them."""
    long = ("test_the_program_finds_nothing", "test_a_quick_run_ends_with_a_page_and_is_not_stale")
    items.sort(key=lambda item: item.name not in long)
    for item in items:
        if NEED_PACKAGES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("packages")
        if PLATFORM and (item.path.name in NEED_DEVICES or item.name.split("[")[0] in NEED_DEVICES):
            item.add_marker(pytest.mark.skip(reason="needs four fake CPU devices"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    marks = re.fullmatch(r"not \((.*)\)", config.option.markexpr)
    if marks is not None:
        names = marks[1].replace(" or ", ", ")
        terminalreporter.write_line(
            f"not run: tests marked {names} (pytest -m grid, say; packages: pip install -e '.[ci]')"
        )


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="module")
def compiled_once() -> Iterator[None]:
    """For modules that train one experiment many times: its step is compiled once for all processes."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", os.environ["HYENA_JAX_TESTS_CACHE"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture
def shakespeare() -> Path:
    if not SHAKESPEARE.exists():
        pytest.skip(f"needs {SHAKESPEARE}")
    return SHAKESPEARE


@pytest.fixture(scope="session")
def _bucket_server() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture
def bucket(_bucket_server) -> Iterator[str]:
    """The URL of an empty folder in a bucket on this machine, `gs://hyenatest/...`, for all clients."""
    with reached_at(_bucket_server):
        yield f"gs://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def proxy(_bucket_server) -> Iterator[Proxy]:
    """Between all clients and the bucket."""
    with Proxy(_bucket_server) as proxy, reached_at(proxy.url):
        yield proxy


@pytest.fixture
def own_parts(monkeypatch) -> None:
    """Parts that a test registers are forgotten after the test."""
    from hyena_jax.config import REGISTRIES

    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_parts", dict(registry.parts))


@pytest.fixture(scope="session")
def command_run(tmp_path_factory) -> Path:
    """A folder with a run of the commands and its text, which `test_cli` and `test_api` read."""
    import test_cli

    return test_cli.trained(tmp_path_factory.mktemp("cli"))


_finished = itertools.count(1)


@pytest.fixture(autouse=True)
def _free_compiled_programs():
    """Each program that JAX keeps takes memory maps, of which Linux grants a process 65,530.

    Beyond that the compiler aborts.
    """
    yield
    if next(_finished) % COUNT_EVERY:
        return
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > MAX_MAPS:
        import jax

        jax.clear_caches()
