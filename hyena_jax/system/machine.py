"""The machine that runs a program: its processor and versions, and the memory that the program takes."""

import ctypes
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from hyena_jax.system.files import n_cpus, resident_bytes

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax")
CLEAR_REFS = Path("/proc/self/clear_refs")
# Written to CLEAR_REFS, it makes the kernel forget the highest resident set so far.
RESET_PEAK = "5"
# The part of the available memory that a program may plan to take.
USABLE = 0.8


def describe_machine() -> dict[str, Any]:
    """Processor or accelerator, cores, and settings of the environment that change times, as JSON values."""
    device = jax.local_devices()[0]
    return {
        "platform": device.platform,
        "device": processor() if device.platform == "cpu" else device.device_kind,
        "devices": len(jax.local_devices()),
        "cores": n_cpus(),
        "system": platform.platform(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES"),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "xla_flags": os.environ.get("XLA_FLAGS"),
    }


def describe_versions(*others: str) -> dict[str, str]:
    """Versions of Python, of the packages that every experiment uses, and of `others`."""
    packages = {name: importlib.metadata.version(name) for name in (*PACKAGES, *others)}
    return {"python": sys.version.split()[0]} | packages


def processor() -> str:
    """The processor's name."""
    try:
        return re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.processor() or platform.machine()


class CompiledMemory(NamedTuple):
    """Bytes that XLA planned: arguments, results, and the peak of temporary buffers."""

    arguments: int
    outputs: int
    temporary: int

    @property
    def total(self) -> int:
        """All three at once."""
        return sum(self)


def compiled_memory(executable: jax.stages.Compiled) -> CompiledMemory | None:
    """The backend's plan for an executable; None from a backend that reports none."""
    analysis = executable.memory_analysis()
    if analysis is None:
        return None
    # An output that takes over a donated argument is counted with the arguments alone.
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return CompiledMemory(analysis.argument_size_in_bytes, outputs, analysis.temp_size_in_bytes)


def live_memory(run: Callable[[], Any]) -> int | None:
    """Bytes at the peak of one run, or None where they cannot be measured.

    On an accelerator, the device's highest use so far, which includes the parameters and inputs of all
    programs, and earlier programs. On Linux, the growth of this process's resident memory during the run:
    temporary buffers, results and memory that the allocator kept, but not the arguments, which existed
    before. The allocator first returns its free memory; otherwise reusing it would hide all growth.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats is not None:
        jax.block_until_ready(run())
        return jax.local_devices()[0].memory_stats().get("peak_bytes_in_use")
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:  # some containers forbid it
        return None
    before = resident_bytes("VmRSS")
    jax.block_until_ready(run())
    return max(resident_bytes("VmHWM") - before, 0)


def fits(n_bytes: int) -> bool:
    """Whether `n_bytes` fit the available memory with room to spare; True if that is unknown."""
    stats = jax.local_devices()[0].memory_stats()
    if stats is not None:
        limit = stats.get("bytes_limit")
        return limit is None or n_bytes <= USABLE * (limit - stats["bytes_in_use"])
    try:
        available = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]
    except (OSError, TypeError):
        return True
    return n_bytes <= USABLE * 1024 * int(available)
