"""Times of programs that take turns, so that whatever else the machine does meets all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

Key = TypeVar("Key")

# Between two programs: the worker threads of the one before stop spinning for more work, seconds.
PAUSE = 2e-3
# More runs than this say nothing more about a median.
MOST_RUNS = 200


class Timing(NamedTuple):
    """Seconds of many runs: median, quartiles, mean; and how many they were."""

    median: float
    lower: float
    upper: float
    mean: float
    runs: int


class Compiled(NamedTuple):
    """A program compiled ahead of time, and the seconds that tracing and compiling took."""

    executable: jax.stages.Compiled
    seconds: float


def summarize(seconds: list[float]) -> Timing:
    """The statistics of one or more runs."""
    if len(seconds) == 1:
        return Timing(seconds[0], seconds[0], seconds[0], seconds[0], 1)
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, lower, upper, statistics.fmean(seconds), len(seconds))


def compile_program(function: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Compiled:
    """`function` compiled for arguments of the shapes of `args`, which are not run."""
    start = time.perf_counter()
    executable = jax.jit(function, donate_argnums=donate).lower(*args).compile()
    return Compiled(executable, time.perf_counter() - start)


def time_once(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds from the call until its result is there."""
    start = clock()
    jax.block_until_ready(run())
    return clock() - start


def interleave(
    programs: Mapping[Key, Callable[[], Any]],
    budget: float,
    least_runs: int,
    clock: Callable[[], float] = time.perf_counter,
    pause: Callable[[float], None] = time.sleep,
) -> dict[Key, Timing]:
    """Times programs that have run before, one run each a round.

    Args:
      programs: functions without arguments; a result of JAX arrays is waited for.
      budget: seconds for each program; it leaves the rounds when its runs have taken them.
      least_runs: of every program, however long they take.
    """
    seconds = {key: [] for key in programs}
    running = dict(programs)
    while running:
        for key, run in list(running.items()):
            pause(PAUSE)
            seconds[key].append(time_once(run, clock))
            n_runs = len(seconds[key])
            enough = sum(seconds[key]) >= budget or n_runs >= MOST_RUNS
            if n_runs >= least_runs and enough:
                del running[key]
    return {key: summarize(times) for key, times in seconds.items()}
