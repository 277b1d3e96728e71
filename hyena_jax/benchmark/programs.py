"""Programs that are measured together: compiled, warmed up, then timed in turns."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

from hyena_jax.benchmark.memory import CompiledMemory, compiled_memory, live_memory
from hyena_jax.benchmark.timing import Timing, compile_program, interleave, summarize, time_once

Key = TypeVar("Key")


class Program(NamedTuple):
    """What can be run, and what its compiler said of it; a program without a compiler said nothing."""

    run: Callable[[], Any]
    compile_seconds: float | None = None
    memory: CompiledMemory | None = None
    xla_flops: float | None = None
    xla_bytes: float | None = None


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure."""

    budget: float
    """Seconds of each program, at each size."""
    least_runs: int
    """Runs of each program that the median is of, at least."""
    max_seconds: float
    """A program that takes longer is run once, and not at longer lengths."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One program's numbers: seconds, bytes, FLOPs; None is what nothing here can measure."""

    seconds: Timing
    compile_seconds: float | None
    compiled_bytes: int | None
    """Arguments, results and temporary buffers, as planned."""
    live_bytes: int | None
    """See `live_memory`."""
    xla_flops: float | None
    """Of XLA's cost analysis, which counts one round of a loop, and of an FFT nothing or a matrix product."""
    xla_bytes: float | None
    """Bytes accessed, likewise."""
    flops: float | None = None
    """As counted in the jaxpr of our mixer: see `counts`."""
    least_bytes: float | None = None
    """The least traffic, likewise."""
    roofline_share: float | None = None
    """Least time by these counts and the measured roofline, over the median."""


def jit_program(function: Callable, *args: Any) -> Program:
    """`function(*args)`, compiled."""
    compiled = compile_program(function, *args)
    return describe(compiled.executable, compiled.seconds, lambda: compiled.executable(*args))


def describe(executable: jax.stages.Compiled, seconds: float, run: Callable[[], Any]) -> Program:
    """A program that runs an executable, with what its compiler says of it."""
    cost = executable.cost_analysis() or {}
    memory = compiled_memory(executable)
    return Program(run, seconds, memory, cost.get("flops"), cost.get("bytes accessed"))


def measure(
    programs: Mapping[Key, Program],
    effort: Effort,
    advance: Callable[[], None] = lambda: None,
) -> dict[Key, Measured]:
    """Warms up and measures programs together; the keys of the result are those given.

    Args:
      advance: called once for each program, when it has been warmed up.
    """
    timings, live, quick = {}, {}, {}
    for key, program in programs.items():
        first = time_once(program.run)
        if first > effort.max_seconds:
            timings[key] = summarize([first])
        else:
            live[key] = live_memory(program.run)
            quick[key] = program.run
        advance()
    timings |= interleave(quick, effort.budget, effort.least_runs)
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
