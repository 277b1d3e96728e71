"""Programs measured together: compiled, warmed up, then timed in turns.

The programs take turns so that other load on the machine affects all of them alike.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax

from hyena_jax.benchmark.memory import CompiledMemory, compiled_memory, live_memory
from hyena_jax.benchmark.settings import Effort

Key = TypeVar("Key")

# Seconds between two programs, in which the first one's worker threads stop spinning for more work.
PAUSE = 2e-3
# More runs than this add nothing to a median.
MAX_RUNS = 200


@dataclass(frozen=True)
class Timing:
    """Statistics of the seconds of one or more runs: median, quartiles and mean."""

    median: float
    lower: float
    upper: float
    mean: float
    runs: int


class Program(NamedTuple):
    """A function without arguments, and what its compiler reported; None for a program without a compiler."""

    run: Callable[[], Any]
    compile_seconds: float | None = None
    """Seconds of tracing and compiling."""
    memory: CompiledMemory | None = None
    xla_flops: float | None = None
    xla_bytes: float | None = None


@dataclass(frozen=True)
class Measured:
    """One program's numbers: seconds, bytes, FLOPs; None where this machine cannot measure them."""

    seconds: Timing
    compile_seconds: float | None
    compiled_bytes: int | None
    """Planned bytes of arguments, results and temporary buffers."""
    live_bytes: int | None
    """See `live_memory`."""
    xla_flops: float | None
    """From XLA's cost analysis, which counts a loop as one round, and an FFT as nothing or a product."""
    xla_bytes: float | None
    """Bytes accessed, from the same analysis."""
    flops: float | None = None
    """Counted in the jaxpr of our mixer: see `counts`."""
    least_bytes: float | None = None
    """The least traffic, counted in the same jaxpr."""
    roofline_share: float | None = None
    """The least time that these counts and the measured roofline allow, over the median."""


def jit_program(function: Callable, *args: Any) -> Program:
    """`function(*args)`, compiled."""
    start = time.perf_counter()
    executable = jax.jit(function).lower(*args).compile()
    return describe(executable, time.perf_counter() - start, lambda: executable(*args))


def describe(executable: jax.stages.Compiled, seconds: float, run: Callable[[], Any]) -> Program:
    """The program that runs an executable, which took `seconds` to trace and compile."""
    cost = executable.cost_analysis() or {}
    memory = compiled_memory(executable)
    return Program(run, seconds, memory, cost.get("flops"), cost.get("bytes accessed"))


def measure(programs: Mapping[Key, Program], effort: Effort) -> dict[Key, Measured]:
    """Warms up and measures programs together; the result has the keys of `programs`."""
    timings, live, quick = {}, {}, {}
    for key, program in programs.items():
        first = time_once(program.run)
        if first > effort.max_seconds:
            timings[key] = summarize([first])
        else:
            live[key] = live_memory(program.run)
            quick[key] = program.run
    timings |= interleave(quick, effort.seconds, effort.least_runs)
    return {
        key: Measured(
            seconds=timings[key],
            compile_seconds=program.compile_seconds,
            compiled_bytes=None if program.memory is None else program.memory.total,
            live_bytes=live.get(key),
            xla_flops=program.xla_flops,
            xla_bytes=program.xla_bytes,
        )
        for key, program in programs.items()
    }


def interleave(
    programs: Mapping[Key, Callable[[], Any]],
    budget: float,
    least_runs: int,
    clock: Callable[[], float] = time.perf_counter,
    pause: Callable[[float], None] = time.sleep,
) -> dict[Key, Timing]:
    """Times programs that were warmed up before; each runs once per round.

    Args:
      programs: functions without arguments; the clock stops when their JAX arrays are ready.
      budget: seconds for each program; a program leaves the rounds once its runs have used them up.
      least_runs: minimum runs of every program, however long they take.
    """
    seconds = {key: [] for key in programs}
    running = dict(programs)
    while running:
        for key, run in list(running.items()):
            pause(PAUSE)
            seconds[key].append(time_once(run, clock))
            n_runs = len(seconds[key])
            enough = sum(seconds[key]) >= budget or n_runs >= MAX_RUNS
            if n_runs >= least_runs and enough:
                del running[key]
    return {key: summarize(times) for key, times in seconds.items()}


def time_once(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds from the call until its result is ready."""
    start = clock()
    jax.block_until_ready(run())
    return clock() - start


def summarize(seconds: list[float]) -> Timing:
    """The statistics of one or more runs."""
    if len(seconds) == 1:
        return Timing(seconds[0], seconds[0], seconds[0], seconds[0], 1)
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, lower, upper, statistics.fmean(seconds), len(seconds))
