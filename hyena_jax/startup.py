"""What a command does before it computes: refuse a JAX that is wrong, and keep compiled programs on disk."""

import importlib.metadata
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from hyena_jax.config.checks import UserError

# The fault is XLA's, so jaxlib's: under jax 0.10.2, jaxlib 0.10.1 is right.
MISCOMPILES_ON_CPUS = "0.10.2"
# Where compiled programs are kept; `off` for nowhere.
CACHE_VARIABLE = "HYENA_JAX_COMPILATION_CACHE"
# Nearly all of the time goes into few programs, and JAX looks at every entry when it writes one.
CACHE_SETTINGS = {
    "jax_compilation_cache_max_size": 256 * 2**20,  # bytes; the least recently used go first
    "jax_persistent_cache_min_compile_time_secs": 0.1,
}


def refuse_wrong_jaxlib() -> None:
    """Raises UserError if this jaxlib miscompiles and may run on a CPU.

    A CPU is assumed unless JAX_PLATFORMS names an accelerator first: to ask JAX would start its backends,
    which must not happen before several processes have joined.
    """
    version = importlib.metadata.version("jaxlib")
    platform = os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    if version == MISCOMPILES_ON_CPUS and platform in ("", "cpu"):
        raise UserError(
            f"jaxlib {version} computes wrong values on CPUs (jax-ml/jax#39103); install another version: "
            "pip install jax==0.10.1, or pip install --upgrade jax on Python 3.12 and newer "
            "(on an accelerator, JAX_PLATFORMS=cuda or JAX_PLATFORMS=tpu lets this one run)"
        )


def keep_compiled_programs(note: Callable[[str], None]) -> None:
    """Sets JAX's persistent compilation cache, unless the user did; a folder that cannot be used is noted.

    The folder is `hyena_jax` in XDG_CACHE_HOME or ~/.cache, or the value of CACHE_VARIABLE. Where a later
    read or write fails, on a full disk for instance, JAX compiles as it would without the cache.
    """
    import jax

    chosen = os.environ.get(CACHE_VARIABLE, "")
    chosen_in_jax = jax.config.jax_compilation_cache_dir is not None
    if chosen == "off" or chosen_in_jax or not jax.config.jax_enable_compilation_cache:
        return
    try:
        folder = _own_folder(Path(chosen).expanduser() if chosen else _user_cache())
    except (OSError, RuntimeError) as error:  # the latter where there is no home
        note(f"compiled programs are not kept: {error}; {CACHE_VARIABLE} names another folder, or is off")
        return
    for failure in ("Error (reading|writing) persistent compilation cache", "Cache value for key"):
        warnings.filterwarnings("ignore", failure)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, value in CACHE_SETTINGS.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


def _user_cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "hyena_jax"


def _own_folder(parent: Path) -> Path:
    """The folder of programs compiled for as many CPUs as this process may use, made if missing.

    XLA divides its loops by the number of CPUs; JAX's cache keys contain the CPU's features, not this number.
    """
    n_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    folder = parent.resolve() / f"{n_cpus}_cpus"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if os.name == "posix" and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise PermissionError(f"{folder} can be written by others, whose programs would run here")
    tempfile.TemporaryFile(dir=folder).close()
    # A process that dies, or a full disk, may leave an entry without its time of access, which is written
    # last. JAX 0.10 would then fail at every write to this folder.
    names = set(os.listdir(folder))
    for name in names:
        if name.endswith("-cache") and f"{name.removesuffix('-cache')}-atime" not in names:
            (folder / name).unlink(missing_ok=True)
    return folder
