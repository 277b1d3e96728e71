"""The course of every benchmark: check all methods, then build and measure them, one size after the other."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import jax

from hyena_jax.benchmark.machine import Roofline, measure_roofline
from hyena_jax.benchmark.memory import fits
from hyena_jax.benchmark.results import MIB, Cells, Picture, Report, Results, number
from hyena_jax.benchmark.settings import Common
from hyena_jax.benchmark.timing import Measured, Program, measure
from hyena_jax.ops.counts import Work
from hyena_jax.system.output import bar

Size = Mapping[str, int]
"""What grows from row to row, such as the length, by name."""


class Case(NamedTuple):
    """A method at one size, ready to be measured."""

    programs: dict[str, Program]
    """By pass."""
    facts: dict[str, Any]
    """What its row says besides the measurements, such as the number of parameters."""
    works: Mapping[str, Work] = {}
    """By pass, where operations are counted."""
    estimated_bytes: int = 0
    """What the programs need, if no compiler planned it."""

    @property
    def needed_bytes(self) -> int:
        """Bytes of the largest program: as its compiler planned, or estimated."""
        planned = [program.memory.total for program in self.programs.values() if program.memory is not None]
        return max(planned, default=self.estimated_bytes)


@dataclass(frozen=True)
class Measurement:
    """The measurements of one method at one size."""

    method: str
    size: Size
    facts: dict[str, Any]
    passes: dict[str, Measured]

    def as_json(self) -> dict[str, Any]:
        """The row of results.json."""
        passes = {part: asdict(measured) for part, measured in self.passes.items()}
        return {"method": self.method, **self.size, **self.facts, "passes": passes}


class Benchmark(NamedTuple):
    """What one benchmark measures, and how it is shown."""

    methods: Sequence[str]
    sizes: Sequence[Size]
    """In increasing order."""
    check: Callable[[str], bool]
    """Raises `verify.Mismatch` unless a method equals its oracle; returns whether there is one."""
    build: Callable[[str, Size], Case]
    """Compiles a method's programs."""
    cells: Callable[[Measurement], Iterator[Cells]]
    """The lines of a row."""
    picture: Callable[[Results], Picture]
    summary: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]] = lambda rows: {}
    """Further entries of results.json, of its rows."""
    lines: Callable[[Results], list[str]] = lambda results: []
    """What is printed below the table, of results.json."""
    roofline_dtype: str | None = None
    """Where operations are counted: the dtype in which the machine's limits are measured."""


def run(benchmark: Benchmark, settings: Common, report: Report) -> None:
    """Checks every method, measures it at every size, and reports."""
    methods, note = benchmark.methods, report.notes.append
    summary: dict[str, Any] = {}
    with bar("measuring", len(methods) * (1 + len(benchmark.sizes)), report.console) as advance:
        for method in methods:
            if not benchmark.check(method):
                note(f"values not checked: {method} has no oracle, or a part of it has none")
            advance()
        roofline = None
        if benchmark.roofline_dtype is not None:
            roofline = measure_roofline(benchmark.roofline_dtype)
            summary["roofline"] = roofline._asdict()
        for row in measure_rows(benchmark, settings, roofline, lambda: advance(len(methods)), note):
            report.add(row.as_json(), benchmark.cells(row))
            report.write(**summary, **benchmark.summary(report.rows))
    report.finish(benchmark.lines, benchmark.picture, **summary, **benchmark.summary(report.rows))


def measure_rows(
    benchmark: Benchmark,
    settings: Common,
    roofline: Roofline | None,
    advance: Callable[[], None],
    note: Callable[[str], None],
) -> Iterator[Measurement]:
    """The rows of all methods, size by size; at each size all programs take turns.

    A method that does not fit the memory, or took too long, is not measured at sizes that are as large in
    everything.

    Args:
      advance: called once for each size.
      note: called with a line for every such method, and for loops that cannot be counted.
    """
    last: dict[str, list[Size]] = {method: [] for method in benchmark.methods}
    for size in benchmark.sizes:
        where = ", ".join(f"{name} {value:,}" for name, value in size.items())
        cases = {}
        for method in benchmark.methods:
            if any(all(size[name] >= value for name, value in end.items()) for end in last[method]):
                continue
            case = benchmark.build(method, size)
            if fits(case.needed_bytes):
                cases[method] = case
            else:
                last[method].append(size)
                note(f"{method}: {case.needed_bytes / 2**30:,.1f} GiB at {where} are more than is available")
        programs = {
            (method, part): each for method, case in cases.items() for part, each in case.programs.items()
        }
        measured = measure(programs, settings)
        if settings.profile is not None:
            for (method, part), program in programs.items():
                name = re.sub(r"[^\w.-]+", "_", f"{method} {where} {part}")
                with jax.profiler.trace(settings.profile / name):
                    jax.block_until_ready(program.run())
        for method, case in cases.items():
            passes = {part: measured[method, part] for part in case.programs}
            for part in passes.keys() & case.works.keys():
                passes[part] = _with_work(passes[part], case.works[part], roofline)
            yield Measurement(method, size, case.facts, passes)
            open_loops = max((work.open_loops for work in case.works.values()), default=0)
            if open_loops and size == benchmark.sizes[0]:
                note(f"{method}: {open_loops} loops of unknown length are counted as one round each")
            runs = (passes[part].seconds.median * each.rounds for part, each in case.programs.items())
            if max(runs) > settings.max_seconds:
                last[method].append(size)
                limit = f"took over {settings.max_seconds:g} s; no longer"
                note(f"{method}: a run at {where} {limit}")
        advance()


def _with_work(measured: Measured, work: Work, roofline: Roofline | None) -> Measured:
    share = None
    if roofline is not None:
        share = roofline.least_seconds(work.flops, work.bytes) / measured.seconds.median
    return replace(measured, flops=work.flops, least_bytes=work.bytes, roofline_share=share)


def cost_cells(measured: Measured) -> Cells:
    """What a program took before its runs, and what it plans and takes of memory."""
    traced = [measured.trace_seconds, measured.lower_seconds]
    known = [seconds for seconds in traced if seconds is not None]
    return {
        "trace s": number(sum(known) if known else None, ".2f"),
        "compile s": number(measured.compile_seconds, ".2f"),
        "dispatch µs": number(measured.seconds.dispatch, ",.0f", 1e-6),
        "MiB planned": number(measured.compiled_bytes, ",.1f", MIB),
        "MiB live": number(measured.live_bytes, ",.1f", MIB),
    }


def work_cells(measured: Measured) -> Cells:
    """Counted operations, and the share of the machine's limits."""
    return {
        "GFLOP": number(measured.flops, ",.3g", 1e9),
        "by XLA": number(measured.xla_flops, ",.3g", 1e9),
        "roofline": number(measured.roofline_share, ".1%"),
    }
