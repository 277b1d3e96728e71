"""The start of a command: starts JAX, or reports why it cannot start, and keeps compiled programs."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from hyena_jax.system.errors import UserError, describe_fault
from hyena_jax.system.files import n_cpus
from hyena_jax.system.storage.bucket import Bucket
from hyena_jax.system.storage.location import Location, is_url

# The faults are in XLA, so in jaxlib: jax 0.10.2 with jaxlib 0.10.1 is right.
FAILS_ON_CPUS = {
    "0.10.2": "computes wrong values on CPUs (jax-ml/jax#39103)",
    "0.11.2": "hangs in FFTs on CPUs (openxla/xla#46347)",
}
# Folder of compiled programs, or `off`.
CACHE_VARIABLE = "HYENA_JAX_COMPILATION_CACHE"
# Few programs take nearly all of the compile time, and JAX looks at every entry when it writes one.
CACHE_SETTINGS = {
    "jax_compilation_cache_max_size": 256 * 2**20,  # bytes; the least recently used are removed first
    "jax_persistent_cache_min_compile_time_secs": 0.1,
}
# With other values than these, Flax, Optax or Orbax fail, or a run would take days.
NOT_FOR_DEBUGGING = {
    "jax_disable_jit": (False,),
    "jax_no_tracing": (False,),
    "jax_numpy_dtype_promotion": ("standard",),
    "jax_numpy_rank_promotion": ("allow", "warn"),
    "jax_transfer_guard": (None, "allow", "log"),
}
CHOOSE_DEVICES = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES")


def quiet_libraries() -> None:
    """Silences the start-up messages of libraries, which would bury ours; the user's own setting wins.

    Orbax, asyncio and gcsfs also log the errors that Orbax raises; Python warns of writes that did not begin.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # what a program that imports JAX passes on
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["MPLBACKEND"] = "agg"  # figures are only written to files
    for name in ("absl", "asyncio", "gcsfs"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


def start_jax(note: Callable[[str], None]) -> None:
    """Imports JAX, keeps compiled programs and starts the devices, for a command in one process."""
    import_jax()
    keep_compiled_programs(note)
    start_devices()


def has_accelerator() -> bool:
    """Whether there is a device for an installed plugin of JAX, which then does not choose the CPU."""
    has_tpu = any(Path("/dev").glob("accel*")) or any(Path("/dev").glob("vfio/*"))
    return (_has_libtpu() and has_tpu) or (_has_cuda() and any(Path("/dev").glob("nvidia[0-9]*")))


def _has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def _has_cuda() -> bool:
    return any(importlib.util.find_spec(f"jax_cuda{n}_plugin") is not None for n in (12, 13))


def import_jax() -> None:
    """Imports JAX; raises UserError if an environment variable prevents that, or breaks commands."""
    if "JAX_PLATFORMS" not in os.environ and _has_libtpu() and not _has_cuda() and not has_accelerator():
        # libtpu would print errors of its own.
        os.environ["JAX_PLATFORMS"] = "cpu"
    if "XLA_FLAGS" in os.environ and "jax" not in sys.modules:
        _try_xla_flags(os.environ["XLA_FLAGS"])
    try:
        import jax
    except Exception as error:
        reason = describe_fault(error)
        raise UserError(
            f"JAX cannot be imported ({reason}); check the environment variables JAX_*"
        ) from error
    for name, usual in NOT_FOR_DEBUGGING.items():
        value = getattr(jax.config, name)
        if value not in usual:
            raise UserError(f"{name.upper()}={value} is a setting for debugging; unset it to run a command")


def _try_xla_flags(flags: str) -> None:
    """Tries the flags in another process, since XLA aborts the process if they are wrong.

    Flags that passed are not tried again with the same jaxlib.
    """
    version = importlib.metadata.version("jaxlib")
    name = hashlib.sha256(f"{version} {flags}".encode(errors="replace")).hexdigest()
    passed = None
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        passed = _user_cache() / "xla_flags" / name
        if passed.exists():
            return
    code = "import contextlib\nwith contextlib.suppress(Exception): import jax; jax.devices('cpu')"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "0"}
    tried = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, errors="replace"
    )
    if tried.returncode != 0:
        lines = re.findall(r"^[EF]\d{4} [^]]*\] (.*)", tried.stderr, re.MULTILINE)  # errors in Abseil's log
        reason = lines[0] if lines else f"XLA ended with code {tried.returncode}"
        raise UserError(f"XLA_FLAGS must hold flags that this XLA knows, got {flags!r}: {reason}")
    if passed is not None:
        with contextlib.suppress(OSError):
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()


def start_devices() -> None:
    """Starts JAX's devices, after all processes have joined; raises UserError if they cannot start."""
    import jax

    try:
        jax.devices()
    except Exception as error:  # its class depends on what is missing
        asked = [f"{name}={os.environ[name]}" for name in CHOOSE_DEVICES if name in os.environ]
        where = f"the environment asks for {', '.join(asked)}" if asked else "check the drivers"
        raise UserError(f"JAX cannot start its devices ({describe_fault(error)}); {where}") from error


def refuse_wrong_jaxlib() -> None:
    """Raises UserError if this jaxlib is one of `FAILS_ON_CPUS` and is going to run on a CPU.

    JAX_PLATFORMS says so, or that there is no accelerator: asking JAX would start its backends, which must
    not happen before several processes have joined.
    """
    version = importlib.metadata.version("jaxlib")
    platform = os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    is_cpu = platform == "cpu" or (platform == "" and not has_accelerator())
    if version in FAILS_ON_CPUS and is_cpu:
        raise UserError(
            f"jaxlib {version} {FAILS_ON_CPUS[version]}; install another version: "
            "pip install jax==0.10.1, or pip install --upgrade jax on Python 3.12 and newer "
            "(on an accelerator, JAX_PLATFORMS=cuda or JAX_PLATFORMS=tpu lets this one run)"
        )


def keep_compiled_programs(note: Callable[[str], None]) -> None:
    """Sets JAX's persistent compilation cache, unless the user did; notes a folder that cannot be used.

    The folder is `hyena_jax` in XDG_CACHE_HOME or ~/.cache, or the value of CACHE_VARIABLE, which may be
    gs://BUCKET/NAME: there nothing is removed, which a rule of the bucket can do. If a later read or write
    fails, as on a full disk, JAX compiles as without the cache.
    """
    import jax

    chosen = os.environ.get(CACHE_VARIABLE, "")
    chosen_in_jax = jax.config.jax_compilation_cache_dir is not None
    if chosen == "off" or chosen_in_jax or not jax.config.jax_enable_compilation_cache:
        return
    settings = dict(CACHE_SETTINGS)
    try:
        if is_url(chosen):
            folder = Bucket(Location.parse(chosen, CACHE_VARIABLE)).location / _for_these_cpus()
            # A bound needs a lock, which JAX makes on the disk.
            settings["jax_compilation_cache_max_size"] = -1
        else:
            folder = _own_folder(Path(chosen).expanduser() if chosen else _user_cache())
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        note(f"compiled programs are not kept: {error}; {CACHE_VARIABLE} names another folder, or is off")
        return
    for failure in ("Error (reading|writing) persistent compilation cache", "Cache value for key"):
        warnings.filterwarnings("ignore", failure)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


def _user_cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "hyena_jax"


def _for_these_cpus() -> str:
    """XLA splits loops by the number of CPUs, which is not part of JAX's cache keys."""
    return f"{n_cpus()}_cpus"


def _own_folder(parent: Path) -> Path:
    folder = parent.resolve() / _for_these_cpus()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if os.name == "posix" and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise PermissionError(f"{folder} is writable by other users, whose programs would run here")
    tempfile.TemporaryFile(dir=folder).close()
    # A process that dies, or a full disk, may leave an entry without its access time, which is written last.
    # JAX 0.10 would then fail at every write to this folder.
    names = set(os.listdir(folder))
    for name in names:
        if name.endswith("-cache") and f"{name.removesuffix('-cache')}-atime" not in names:
            (folder / name).unlink(missing_ok=True)
    return folder
