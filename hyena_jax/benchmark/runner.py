"""The course of every benchmark: check all methods, then build and measure them, one size after the other."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import jax

from hyena_jax.benchmark.results import Cells, Picture, Report, Results, Row
from hyena_jax.benchmark.settings import Common
from hyena_jax.benchmark.timing import Roofline, Runnable, measure, measure_roofline
from hyena_jax.system.chips import GIB
from hyena_jax.system.machine import fits
from hyena_jax.system.output import bar

# Names of passes.
FORWARD, BOTH = "forward", "forward_backward"

Size = Mapping[str, int]
"""What grows from row to row, such as the length, by name."""


class Case(NamedTuple):
    """A method at one size, ready to be measured."""

    programs: dict[str, Runnable]
    """By pass."""
    facts: dict[str, Any]
    """What its row says besides the measurements, such as the number of parameters."""
    estimated_bytes: int = 0
    """What the programs need, if no compiler planned it."""

    @property
    def needed_bytes(self) -> int:
        planned = [program.memory.total for program in self.programs.values() if program.memory is not None]
        return max(planned, default=self.estimated_bytes)


class Benchmark(ABC):
    """What one benchmark measures, and how it is shown; a subclass is made of its settings."""

    methods: Sequence[str]
    """What is compared at each size."""
    sizes: Sequence[Size]
    """In increasing order."""
    roofline_dtype: str | None = None
    """Where operations are counted, the dtype in which the machine's limits are measured."""

    @abstractmethod
    def check(self, method: str) -> bool:
        """Raises `verify.Mismatch` unless a method equals its oracle; returns whether there is one."""

    @abstractmethod
    def build(self, method: str, size: Size) -> Case:
        """Compiles a method's programs."""

    @abstractmethod
    def cells(self, row: Row) -> Iterator[Cells]:
        """The lines of a row in the table."""

    @staticmethod
    @abstractmethod
    def picture(results: Results) -> Picture:
        """The figure, of results.json."""

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Further entries of results.json, of its rows."""
        return {}

    def lines(self, results: Results) -> list[str]:
        """What is printed below the table, of results.json."""
        return []


def run(benchmark: Benchmark, settings: Common, report: Report) -> None:
    """Checks every method, measures it at every size, and reports."""
    methods = benchmark.methods
    with bar("measuring", len(methods) * (1 + len(benchmark.sizes)), report.console) as advance:
        for method in methods:
            if not benchmark.check(method):
                report.notes.append(f"values not checked: {method} has no oracle, or a part of it has none")
            advance()
        roofline = None
        if benchmark.roofline_dtype is not None:
            roofline = measure_roofline(benchmark.roofline_dtype)
            report.summary["roofline"] = roofline._asdict()
        rows = measure_rows(benchmark, settings, roofline, lambda: advance(len(methods)), report.notes.append)
        for row in rows:
            report.add(row, benchmark.cells(row))
            report.summary |= benchmark.summary(report.rows)
            report.write()
    report.summary |= benchmark.summary(report.rows)
    report.finish(benchmark.lines, benchmark.picture)


def measure_rows(
    benchmark: Benchmark,
    settings: Common,
    roofline: Roofline | None,
    advance: Callable[[], None],
    note: Callable[[str], None],
) -> Iterator[Row]:
    """The rows of all methods, size by size; at each size all programs take turns, then `advance` is called.

    A method that does not fit the memory, or took too long, is not measured at sizes that are as large in
    everything. `note` gets a line for every such method, and for loops that cannot be counted.
    """
    last: dict[str, list[Size]] = {method: [] for method in benchmark.methods}
    for size in benchmark.sizes:
        where = ", ".join(f"{name} {value:,}" for name, value in size.items())
        cases: dict[str, Case] = {}
        for method in benchmark.methods:
            if any(all(size[name] >= value for name, value in end.items()) for end in last[method]):
                continue
            case = benchmark.build(method, size)
            if fits(case.needed_bytes):
                cases[method] = case
            else:
                last[method].append(size)
                note(f"{method}: {case.needed_bytes / GIB:,.1f} GiB at {where} are more than is available")
        programs = {
            (method, part): each for method, case in cases.items() for part, each in case.programs.items()
        }
        measured = measure(programs, settings, roofline)
        if settings.profile is not None:
            for (method, part), program in programs.items():
                name = re.sub(r"[^\w.-]+", "_", f"{method} {where} {part}")
                with jax.profiler.trace(settings.profile / name):
                    jax.block_until_ready(program.run())
        for method, case in cases.items():
            passes = {part: asdict(measured[method, part]) for part in case.programs}
            yield {"method": method, **size, **case.facts, "passes": passes}
            works = [program.work for program in case.programs.values() if program.work is not None]
            open_loops = max((work.open_loops for work in works), default=0)
            if open_loops and size == benchmark.sizes[0]:
                note(f"{method}: {open_loops} loops of unknown length are counted as one round each")
            runs = (
                measured[method, part].seconds.median * each.rounds for part, each in case.programs.items()
            )
            if max(runs) > settings.max_seconds:
                last[method].append(size)
                note(f"{method}: a run at {where} took over {settings.max_seconds:g} s; no longer")
        advance()
