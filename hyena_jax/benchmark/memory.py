"""How much memory a program takes, as its compiler planned it and as it was seen while it ran."""

import ctypes
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# What writing it to CLEAR_REFS asks for: forget the highest resident set so far.
RESET_PEAK = "5"
# Part of the available memory that a program may plan to take.
USABLE = 0.8


class CompiledMemory(NamedTuple):
    """Bytes that XLA planned: arguments, results, and the most of temporary buffers."""

    arguments: int
    outputs: int
    temporary: int

    @property
    def total(self) -> int:
        """All three at once."""
        return sum(self)


def compiled_memory(executable: jax.stages.Compiled) -> CompiledMemory | None:
    """What the backend says of an executable; None where it says nothing."""
    analysis = executable.memory_analysis()
    if analysis is None:
        return None
    # An output that takes over a donated argument is counted with the arguments alone.
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return CompiledMemory(analysis.argument_size_in_bytes, outputs, analysis.temp_size_in_bytes)


def live_memory(run: Callable[[], Any]) -> int | None:
    """Bytes at the peak of one run, or None where nothing measures them.

    On an accelerator the highest use of the device so far, in which the parameters and inputs of all
    programs count, and earlier programs too. On Linux the growth of this process's resident memory during
    the run: temporary buffers, results and whatever the allocator did not give back, but not the arguments,
    which were there before. The allocator's free memory is given back first, or reuse would hide all of it.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats is not None:
        jax.block_until_ready(run())
        return jax.local_devices()[0].memory_stats().get("peak_bytes_in_use")
    if sys.platform != "linux":
        return None
    _give_back_free_memory()
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:  # some containers forbid it
        return None
    before = _resident("VmRSS")
    jax.block_until_ready(run())
    return max(_resident("VmHWM") - before, 0)


def available_memory() -> int | None:
    """Bytes that a new program may take here; None where it is not known."""
    stats = jax.local_devices()[0].memory_stats()
    if stats is not None:
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats["bytes_in_use"]
    try:
        return 1024 * int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
    except (OSError, TypeError):
        return None


def fits(n_bytes: int) -> bool:
    """Whether a program that takes so much can run without driving the machine to its limit."""
    available = available_memory()
    return available is None or n_bytes <= USABLE * available


def _resident(field: str) -> int:
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", STATUS.read_text())[1])


def _give_back_free_memory() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
