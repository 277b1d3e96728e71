"""Which JAX versions are accepted, and where commands keep compiled programs."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from hyena_jax import cli
from hyena_jax.data.objects import Objects
from hyena_jax.system import startup
from hyena_jax.system.errors import UserError

# jax-ml/jax#39103: the rows of a tall array times a small matrix, squared and summed. One row more than XLA's
# CPU kernel took at once was wrong. Small whole numbers, so that equality is exact.
PRODUCT_AND_SUM = """
import jax
import numpy as np

jax.config.update("jax_enable_x64", True)
for dtype, rows in ((np.float32, 32_769), (np.float64, 16_385)):
    for channels in (2, 3):
        x = np.arange(3 * rows).reshape(rows, 3) % 1000
        matrix = np.arange(3 * channels).reshape(channels, 3) % 2
        expected = ((x @ matrix.T) ** 2).sum(axis=1)
        got = jax.jit(lambda m, x: ((m @ x.T) ** 2).sum(axis=0))(matrix.astype(dtype), x.astype(dtype))
        np.testing.assert_array_equal(got, expected)
"""


def python(*arguments, without=(), **variables):
    """A process of its own in this environment, with other variables."""
    environment = {name: value for name, value in os.environ.items() if name not in without}
    command, environment = [sys.executable, *arguments], {**environment, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_nothing_is_said_of_writes_that_a_full_disk_left_undone():
    code = "from hyena_jax.system import startup; startup.quiet_libraries()\nasync def write(): pass\n"
    # Freed at Python's end.
    code += "class Tree: pass\nkept = Tree(); kept.itself = kept; kept.rest = write()"
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.grid
def test_the_installed_jax_multiplies_and_sums_right():
    """In a process without the tests' flags, which lower XLA's optimization."""
    done = python("-c", PRODUCT_AND_SUM, XLA_FLAGS="", JAX_ENABLE_COMPILATION_CACHE="false")
    assert done.returncode == 0, done.stderr


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_PLATFORMS": "nonsense"}, "JAX cannot start its devices .*asks for JAX_PLATFORMS=nonsense"),
        ({"XLA_FLAGS": "--nonsense=1"}, "XLA_FLAGS must hold .*'--nonsense=1'.*Unknown flag"),
        ({"JAX_ENABLE_X64": "x"}, "JAX cannot be imported .*JAX_ENABLE_X64"),
        ({"JAX_DISABLE_JIT": "1"}, "JAX_DISABLE_JIT=True is a setting for debugging"),
    ],
)
def test_an_environment_that_jax_cannot_start_in_is_one_line(tmp_path, variables, message):
    command = ["train", "quickstart", "--workdir", str(tmp_path / "run")]
    done = python("-m", "hyena_jax", *command, without=["XLA_FLAGS"], **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"hyena-jax: error: {message}.*\n", done.stderr)
    assert not (tmp_path / "run").exists()


@pytest.fixture(params=startup.FAILS_ON_CPUS)
def wrong_jaxlib(request, monkeypatch):
    of = startup.importlib.metadata.version
    found = {"jaxlib": request.param}
    monkeypatch.setattr(startup.importlib.metadata, "version", lambda name: found.get(name) or of(name))
    return request.param


@pytest.mark.parametrize("platforms", ["", "cpu", "cpu,cuda"])
def test_a_wrong_jaxlib_is_refused_on_a_cpu(wrong_jaxlib, monkeypatch, capsys, tmp_path, platforms):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    fault = {"0.10.2": "wrong values.*jax-ml/jax#39103", "0.11.2": "hangs in FFTs.*openxla/xla#46347"}
    with pytest.raises(UserError, match=fault[wrong_jaxlib] + ".*pip install jax==0.10.1"):
        startup.refuse_wrong_jaxlib()
    assert cli.main(["train", "quickstart", "--workdir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hyena-jax: error: jaxlib")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("platforms", "has_accelerator"), [("cuda,cpu", False), ("", True)])
def test_a_wrong_jaxlib_may_run_on_an_accelerator(wrong_jaxlib, monkeypatch, platforms, has_accelerator):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(startup, "has_accelerator", lambda: has_accelerator)
    startup.refuse_wrong_jaxlib()


def test_flags_are_tried_once_for_each_jaxlib(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tried = []

    def run(command, **options):
        tried.append(options["env"]["XLA_FLAGS"])
        return subprocess.CompletedProcess(command, int("wrong" in tried[-1]), stdout="", stderr="")

    monkeypatch.setattr(startup.subprocess, "run", run)
    for flags in ("--right", "--right", "--wrong", "--wrong", "--right --other"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        with pytest.raises(UserError, match="--wrong") if "wrong" in flags else contextlib.nullcontext():
            startup._try_xla_flags(flags)
    assert tried == ["--right", "--wrong", "--wrong", "--right --other"]
    monkeypatch.setattr(startup.importlib.metadata, "version", lambda package: "9.9")
    startup._try_xla_flags("--right --other")
    assert len(tried) == 5


def test_help_needs_no_right_jaxlib(wrong_jaxlib, capsys):
    assert cli.main(["generate", "--help"]) == 0
    assert "--prompt" in capsys.readouterr().out


@pytest.fixture
def no_cache_yet(monkeypatch, tmp_path):
    """As in a user's process: no cache is set in JAX's variables or config."""
    names = ("jax_compilation_cache_dir", *startup.CACHE_SETTINGS)
    before = {name: getattr(jax.config, name) for name in names}
    for name in names:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv(startup.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def cache_folder(notes=()) -> Path | None:
    """The cache folder that a command sets; checks that it prints exactly these notes."""
    said = []
    startup.keep_compiled_programs(said.append)
    assert len(said) == len(notes)
    assert all(part in line for part, line in zip(notes, said, strict=True))
    folder = jax.config.jax_compilation_cache_dir
    return None if folder is None else Path(folder)


def test_programs_are_kept_in_the_users_cache_apart_by_numbers_of_cpus(no_cache_yet, monkeypatch, tmp_path):
    folder = cache_folder()
    assert folder == tmp_path / "cache" / "hyena_jax" / f"{len(os.sched_getaffinity(0))}_cpus"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_max_size == 256 * 2**20
    assert cache_folder() == folder
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))
    assert cache_folder().name == "96_cpus"


def test_one_variable_moves_the_cache_or_turns_it_off(no_cache_yet, monkeypatch, tmp_path):
    monkeypatch.setenv(startup.CACHE_VARIABLE, "off")
    assert cache_folder() is None
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.setenv(startup.CACHE_VARIABLE, str(tmp_path / "link"))
    assert cache_folder().parent == tmp_path / "disk"


@pytest.mark.cloud
def test_programs_are_kept_in_a_bucket(bucket, no_cache_yet, monkeypatch):
    monkeypatch.setenv(startup.CACHE_VARIABLE, f"{bucket}/cache")
    assert cache_folder() == Path(f"{bucket}/cache/{len(os.sched_getaffinity(0))}_cpus")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    jax.jit(lambda x: 3 * x + 1)(jnp.ones(7)).block_until_ready()
    compilation_cache.reset_cache()
    assert any(name.endswith("-cache") for name in Objects(bucket, "test").sizes())
    assert not Path("gs:").exists()


def test_what_the_user_set_in_jax_stays(no_cache_yet, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "-1")
    jax.config.update("jax_compilation_cache_max_size", -1)
    assert cache_folder() is not None
    assert jax.config.jax_compilation_cache_max_size == -1
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert cache_folder() == tmp_path
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert cache_folder() is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


def test_a_folder_that_cannot_be_used_is_one_note(no_cache_yet, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(startup.CACHE_VARIABLE, str(tmp_path / "file"))
    assert cache_folder(["Not a directory"]) is None
    monkeypatch.setenv(startup.CACHE_VARIABLE, str(tmp_path / "open"))
    cache_folder().chmod(0o777)
    jax.config.update("jax_compilation_cache_dir", None)
    assert cache_folder(["is writable by other users"]) is None
    monkeypatch.delenv(startup.CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home directory")))
    assert cache_folder(["no home directory"]) is None


def test_entries_that_were_cut_off_are_removed(no_cache_yet):
    folder = cache_folder()
    for name in ("whole-cache", "whole-atime", "cut_off-cache"):
        (folder / name).write_bytes(b"")
    jax.config.update("jax_compilation_cache_dir", None)
    cache_folder()
    assert sorted(path.name for path in folder.iterdir()) == ["whole-atime", "whole-cache"]


# A program compiled without the cache, compiled and written to it, loaded from it, and recompiled because the
# entry was damaged.
THE_SAME_BITS = """
import pathlib
import jax, jax.numpy as jnp, numpy as np
from hyena_jax.system import startup

x = np.random.default_rng(0).normal(size=(32, 257)).astype(np.float32)

def bits():
    jax.clear_caches()
    return np.asarray(jax.jit(lambda x: jnp.tanh(x @ x.T))(x)).tobytes()

plain = bits()
startup.keep_compiled_programs(print)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
assert bits() == plain
(entry,) = pathlib.Path(jax.config.jax_compilation_cache_dir).glob("jit__lambda*-cache")
assert bits() == plain
entry.write_bytes(entry.read_bytes()[:100])
assert bits() == plain
"""


@pytest.mark.grid
def test_cached_programs_compute_the_same_bits_and_print_nothing(tmp_path):
    without = startup.CACHE_VARIABLE, "XLA_FLAGS"
    variables = {"XDG_CACHE_HOME": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = python("-c", THE_SAME_BITS, without=without, **variables)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
