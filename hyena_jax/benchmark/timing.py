"""Programs measured together: compiled, warmed up, then timed in turns.

The programs take turns so that other load on the machine affects all of them alike.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    dispatch: float | None = None
    """Median of the seconds until the call returned; the device may work on, or may have finished."""

    def of_one(self, rounds: int) -> "Timing":
        """The statistics of one of the equal parts of a run."""
        if rounds == 1:
            return self
        times = (self.median, self.lower, self.upper, self.mean)
        return Timing(*(time / rounds for time in times), self.runs)


class Program(NamedTuple):
    """A function without arguments, and what its compiler reported; None for a program without a compiler."""

    run: Callable[[], Any]
    trace_seconds: float | None = None
    """Seconds from the Python function to a jaxpr."""
    lower_seconds: float | None = None
    """Seconds from the jaxpr to the compiler's input."""
    compile_seconds: float | None = None
    """Seconds of the compiler."""
    memory: CompiledMemory | None = None
    xla_flops: float | None = None
    xla_bytes: float | None = None
    rounds: int = 1
    """Equal parts of one run, such as tokens; seconds are of one part, but those of the first run."""


@dataclass(frozen=True)
class Measured:
    """One program's numbers: seconds, bytes, FLOPs; None where this machine cannot measure them."""

    seconds: Timing
    trace_seconds: float | None
    lower_seconds: float | None
    compile_seconds: float | None
    first_seconds: float
    """The first run of the compiled program, which also allocates."""
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
    program = compiled(jax.jit(function), *args)
    return program._replace(run=partial(program.run, *args))


def compiled(function: Any, *args: Any) -> Program:
    """A transformed function, compiled; the program's `run` still takes the arguments.

    Args:
      function: of `jax.jit`, or of `jax.pmap`, which may trace only while it lowers.
    """
    clock = time.perf_counter
    times = [clock()]
    if hasattr(function, "trace"):
        function = function.trace(*args)
        times.append(clock())
        lowered = function.lower()
    else:
        lowered = function.lower(*args)
    times.append(clock())
    executable = lowered.compile()
    times.append(clock())
    *traced, lower, compile_ = (end - start for start, end in itertools.pairwise(times))
    cost, memory = executable.cost_analysis() or {}, compiled_memory(executable)
    flops, n_bytes = cost.get("flops"), cost.get("bytes accessed")
    trace = traced[0] if traced else None
    return Program(executable, trace, lower, compile_, memory, flops, n_bytes)


def measure(programs: Mapping[Key, Program], effort: Effort) -> dict[Key, Measured]:
    """Warms up and measures programs together; the result has the keys of `programs`."""
    first = {key: time_once(program.run) for key, program in programs.items()}
    quick = {key: programs[key].run for key, seconds in first.items() if seconds <= effort.max_seconds}
    live = {key: live_memory(run) for key, run in quick.items()}
    timings = {key: summarize([seconds]) for key, seconds in first.items()}
    timings |= interleave(quick, effort.seconds, effort.least_runs)
    return {
        key: Measured(
            seconds=timings[key].of_one(program.rounds),
            trace_seconds=program.trace_seconds,
            lower_seconds=program.lower_seconds,
            compile_seconds=program.compile_seconds,
            first_seconds=first[key],
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
    dispatch = {key: [] for key in programs}
    running = dict(programs)
    while running:
        for key, run in list(running.items()):
            pause(PAUSE)
            start = clock()
            result = run()
            dispatch[key].append(clock() - start)
            jax.block_until_ready(result)
            seconds[key].append(clock() - start)
            del result
            n_runs = len(seconds[key])
            enough = sum(seconds[key]) >= budget or n_runs >= MAX_RUNS
            if n_runs >= least_runs and enough:
                del running[key]
    return {key: summarize(times, dispatch[key]) for key, times in seconds.items()}


def time_once(run: Callable[[], Any]) -> float:
    """Seconds from the call until its result is ready."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def summarize(seconds: list[float], dispatch: Sequence[float] = ()) -> Timing:
    """The statistics of one or more runs, and of the seconds until their calls returned, where known."""
    returned = statistics.median(dispatch) if dispatch else None
    if len(seconds) == 1:
        return Timing(seconds[0], seconds[0], seconds[0], seconds[0], 1, returned)
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, lower, upper, statistics.fmean(seconds), len(seconds), returned)
