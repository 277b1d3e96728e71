"""Programs measured together: compiled, warmed up, then timed in turns; and the machine's own limits.

They take turns so that other load on the machine affects all alike.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from hyena_jax.benchmark.settings import Effort
from hyena_jax.ops.counts import Work, count
from hyena_jax.system.machine import CompiledMemory, compiled_memory, live_memory

Key = TypeVar("Key")

# Seconds between two programs, in which the first one's worker threads stop spinning for more work.
PAUSE = 2e-3
# More runs than this add nothing to a median.
MAX_RUNS = 200
# For the machine's limits, rows of the square matrices and bytes of the array: far beyond any cache, and
# quick enough to repeat. Seconds to measure them, and the least runs.
MATMUL_SIZE = {"cpu": 2048}
COPY_BYTES = {"cpu": 2**28}
ACCELERATOR_MATMUL_SIZE, ACCELERATOR_COPY_BYTES = 8192, 2**31
ROOFLINE_SECONDS, ROOFLINE_RUNS = 1.0, 5


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
        if rounds == 1:
            return self
        times = (self.median, self.lower, self.upper, self.mean)
        return Timing(*(time / rounds for time in times), self.runs)


class Runnable(NamedTuple):
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
    work: Work | None = None
    """Its operations, where they are counted: those that our own form of it takes."""


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
    flops: float | None
    """Counted in the jaxpr: see `ops.counts`."""
    least_bytes: float | None
    """The least traffic, counted in the same jaxpr."""
    roofline_share: float | None
    """The least time that these counts and the measured roofline allow, over the median."""


class Roofline(NamedTuple):
    """FLOP/s of a matrix product in a dtype, and bytes/s of a copy, reads and writes together."""

    flops_per_second: float
    bytes_per_second: float


def forward_backward(function: Callable) -> Callable[[tuple, Any], tuple[Any, list[jax.Array]]]:
    """(arguments, cotangent of y) -> y, and the gradients of the arguments' arrays in floating point."""

    def both(args: tuple, cotangent: Any) -> tuple[Any, list[jax.Array]]:
        leaves, structure = jax.tree.flatten(args)
        is_real = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

        def of_real(real: list[jax.Array]) -> Any:
            given = iter(real)
            mixed = [next(given) if kind else x for x, kind in zip(leaves, is_real, strict=True)]
            return function(*structure.unflatten(mixed))

        y, pullback = jax.vjp(of_real, [x for x, kind in zip(leaves, is_real, strict=True) if kind])
        return y, pullback(cotangent)[0]

    return both


def counted_program(function: Callable, *args: Any) -> Runnable:
    """`function(*args)`, compiled, with its operations."""
    return jit_program(function, *args)._replace(work=count(function, *args))


def jit_program(function: Callable, *args: Any) -> Runnable:
    """`function(*args)`, compiled."""
    program = compiled(jax.jit(function), *args)
    return program._replace(run=partial(program.run, *args))


def compiled(function: Any, *args: Any) -> Runnable:
    """A function of `jax.jit` or `jax.pmap`, compiled; the program's `run` still takes the arguments."""
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
    return Runnable(executable, *(traced or [None]), lower, compile_, memory, flops, n_bytes)


def measure(
    programs: Mapping[Key, Runnable], effort: Effort, roofline: Roofline | None = None
) -> dict[Key, Measured]:
    """Warms up and measures programs together; the result has the keys of `programs`."""

    def share(work: Work | None, seconds: Timing) -> float | None:
        if work is None or roofline is None:
            return None
        least = max(work.flops / roofline.flops_per_second, work.bytes / roofline.bytes_per_second)
        return least / seconds.median

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
            flops=program.work and program.work.flops,
            least_bytes=program.work and program.work.bytes,
            roofline_share=share(program.work, timings[key].of_one(program.rounds)),
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
    """Times programs that were warmed up before, up to their results; each runs once per round.

    One leaves the rounds once it has had `least_runs`, and they took `budget` seconds.
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


def measure_roofline(dtype: str) -> Roofline:
    """A large matrix product and a large copy on the first local device, medians of several runs."""
    backend = jax.local_devices()[0].platform
    size = MATMUL_SIZE.get(backend, ACCELERATOR_MATMUL_SIZE)
    n_bytes = COPY_BYTES.get(backend, ACCELERATOR_COPY_BYTES)
    matrix = jnp.ones((size, size), dtype)
    multiply = jax.jit(jnp.matmul)
    # Adding 1 costs nothing next to the traffic, and cannot be removed as a copy could. In place: the kernel
    # hands out fresh memory page by page, several times slower.
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    latest = [jnp.ones(n_bytes // matrix.dtype.itemsize, dtype)]

    def copy() -> jax.Array:
        latest[0] = add(latest[0])
        return latest[0]

    jax.block_until_ready((multiply(matrix, matrix), copy()))
    programs = {"matmul": lambda: multiply(matrix, matrix), "copy": copy}
    times = interleave(programs, ROOFLINE_SECONDS, ROOFLINE_RUNS)
    return Roofline(2 * size**3 / times["matmul"].median, 2 * n_bytes / times["copy"].median)
