"""The output of a benchmark: lines of a table, results.json, plot.png."""

import json
import math
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from rich.console import Console

from hyena_jax.benchmark.settings import PLOT, RESULTS, Settings, flags
from hyena_jax.sweeps.figure import COLOURS
from hyena_jax.system.chips import MIB
from hyena_jax.system.files import write_text
from hyena_jax.system.machine import describe_machine, describe_versions
from hyena_jax.system.output import Output
from hyena_jax.system.signals import EndAtOnce, end_at_once

Cells = dict[str, str]
"""One line of a table: cells by the names of their columns."""
Results = dict[str, Any]
"""The contents of results.json."""
Row = dict[str, Any]
"""One of its rows: a method, its size, facts, and `passes`: by name, the fields of `timing.Measured`."""

REFERENCE_COLOUR = "#000000"
# Lines that share a colour, such as ours and PyTorch's, differ by these.
DASHES, MARKERS = ("-", "--", ":", "-."), "osD^v"
MAX_LINES = 8


class Panel(NamedTuple):
    """One quantity of a picture."""

    title: str
    unit: str
    curves: Mapping[str, Mapping[int, float]]
    """By method, such as `hyena` or `hyena (torch)`: a value by length."""


class Picture(NamedTuple):
    """The input of `draw_picture`: panels side by side, over the same lengths."""

    title: str
    x_label: str
    panels: Sequence[Panel]
    reference: str = ""
    """The method that every row of panels shows, in black."""


class Report:
    """Prints rows as they are measured, and keeps them in the output folder if there is one."""

    def __init__(self, settings: Settings, console: Console, command: Sequence[str]):
        self.console = Output(quiet=True) if settings.json else console
        self.rows: list[Row] = []
        self.notes: list[str] = []
        """Lines printed below the rows."""
        self.summary: dict[str, Any] = {}
        """Further entries of results.json."""
        self._settings, self._command = settings, command
        if settings.output is not None:
            self._is_new = not (settings.output / RESULTS).exists()

    def add(self, row: Row, lines: Iterable[Cells]) -> None:
        lines = list(lines)
        texts = [format_line(cells.values(), cells) for cells in lines]
        if not self.rows:
            texts.insert(0, format_line(lines[0], lines[0]))
        self.rows.append(row)
        self._print(texts)

    def _print(self, texts: Iterable[str]) -> None:
        """Where nobody reads the lines, what is measured still goes to the output folder."""
        try:
            for text in texts:
                self.console.print(text, soft_wrap=True)
        except BrokenPipeError:
            if self._settings.output is None:
                raise
            self.console = Output(quiet=True)

    def write(self) -> None:
        """Writes results.json with the rows so far; from then on, a signal reports that they are kept."""
        folder = self._settings.output
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / RESULTS, json.dumps(self._results(), indent=1) + "\n", self._is_new)
        self._is_new = False
        (folder / PLOT).unlink(missing_ok=True)  # it shows an earlier benchmark
        n = len(self.rows)
        if n and isinstance(signal.getsignal(signal.SIGINT), EndAtOnce):
            kept = f"{n} rows measured so far are" if n > 1 else "row measured so far is"
            end_at_once(signal.SIGINT, 130, f"interrupted; the {kept} in {folder}")

    def finish(self, lines: Callable[[Results], list[str]], picture: Callable[[Results], Picture]) -> None:
        """Prints the notes and `lines`, and writes results.json with all notes, and the picture of it."""
        folder, results = self._settings.output, self._results()
        self._print((*self.notes, *lines(results)))
        if folder is not None:
            self.write()
            draw_picture(folder / PLOT, picture(results), results["machine"])
            self._print([f"results: {folder}"])
        if self._settings.json:
            print(json.dumps(results, indent=1))

    def _results(self) -> Results:
        return {
            "benchmark": self._settings.benchmark,
            "command": " ".join(self._command),
            "settings": flags(self._settings),
            "machine": describe_machine(),
            "versions": describe_versions(),
            "notes": self.notes,
            "rows": self.rows,
            **self.summary,
        }


def format_line(cells: Iterable[str], columns: Iterable[str]) -> str:
    """A line of a table that is printed before the next one is known, so columns have fixed widths.

    A column of times with their quartiles, such as `1,234 (1,200-1,301)`, is wider than a plain number.
    """
    first, *others = cells
    widths = [max(len(name), 19 if "ms" in re.split("[ /]", name) else 8) for name in columns][1:]
    return "  ".join([first.ljust(22), *map(str.rjust, others, widths)])


def milliseconds(measured: Mapping[str, Any]) -> str:
    """Median and quartiles of a pass, to three digits."""
    timing = measured["seconds"]

    def digits(seconds: float) -> str:
        value = 1e3 * seconds
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    if timing["runs"] == 1:
        return f"{digits(timing['median'])} (1 run)"
    return f"{digits(timing['median'])} ({digits(timing['lower'])}-{digits(timing['upper'])})"


def number(value: float | None, form: str, unit: float = 1.0) -> str:
    """A number in units; empty if it was not measured."""
    return "" if value is None else format(value / unit, form)


def cost_cells(measured: Mapping[str, Any]) -> Cells:
    """What a pass took before its runs, and what it plans and takes of memory."""
    traced = [measured[name] for name in ("trace_seconds", "lower_seconds") if measured[name] is not None]
    return {
        "trace s": number(sum(traced) if traced else None, ".2f"),
        "compile s": number(measured["compile_seconds"], ".2f"),
        "dispatch µs": number(measured["seconds"]["dispatch"], ",.0f", 1e-6),
        "MiB planned": number(measured["compiled_bytes"], ",.1f", MIB),
        "MiB live": number(measured["live_bytes"], ",.1f", MIB),
    }


def work_cells(measured: Mapping[str, Any]) -> Cells:
    """Counted operations of a pass, and the share of the machine's limits."""
    return {
        "GFLOP": number(measured["flops"], ",.3g", 1e9),
        "by XLA": number(measured["xla_flops"], ",.3g", 1e9),
        "roofline": number(measured["roofline_share"], ".1%"),
    }


def curves(points: Iterable[tuple[str, int, float | None]], unit: float = 1.0) -> dict[str, dict[int, float]]:
    """Values in units, by method and length, without those that were not measured."""
    by_method: dict[str, dict[int, float]] = {}
    for method, length, value in points:
        if value is not None:
            by_method.setdefault(method, {})[length] = value / unit
    return by_method


def panels(points: Iterable[tuple[str, int, Mapping[str, Any]]], of_what: str = "") -> list[Panel]:
    """Time and memory of passes as in `rows`, by method and length; observed bytes without planned ones."""
    seconds, sizes = [], []
    for method, length, measured in points:
        planned = measured["compiled_bytes"]
        seconds.append((method, length, measured["seconds"]["median"]))
        sizes.append((method, length, measured["live_bytes"] if planned is None else planned))
    time, memory = curves(seconds, 1e-3), curves(sizes, MIB)
    return [Panel(f"time{of_what}", "ms", time), Panel(f"memory{of_what}", "MiB", memory)]


def draw_picture(path: Path, picture: Picture, machine: Mapping[str, Any]) -> None:
    """Draws the panels on logarithmic axes: ours and baselines in one colour, at most eight lines a panel.

    More lines are split into several rows of panels with the same axes. The title names the `machine`.
    """
    families: dict[str, list[str]] = {}
    for method in dict.fromkeys(method for panel in picture.panels for method in panel.curves):
        families.setdefault(re.split(r" \(|, ", method)[0], []).append(method)
    reference = families.pop(picture.reference, [])
    room, n_lines = MAX_LINES - len(reference), sum(map(len, families.values()))
    enough = n_lines / max(1, math.ceil(n_lines / room))
    groups: list[list[list[str]]] = [[]]
    for methods in families.values():
        n_drawn = sum(map(len, groups[-1]))
        if n_drawn and (n_drawn >= enough or n_drawn + len(methods) > room):
            groups.append([])
        groups[-1].append(methods)

    lengths = sorted({x for panel in picture.panels for points in panel.curves.values() for x in points})
    figure = Figure(figsize=(11, 0.8 + 3.6 * len(groups)), layout="constrained")
    title = f"{picture.title}; {machine['device']}, {machine['cores']} cores"
    figure.suptitle(title, fontsize="medium")
    grid = figure.subplots(len(groups), len(picture.panels), squeeze=False, sharex=True, sharey="col")
    for row, group in zip(grid, groups, strict=True):
        coloured = [(REFERENCE_COLOUR, reference), *zip(COLOURS, group, strict=False)]
        for axes, panel in zip(row, picture.panels, strict=True):
            for colour, methods in coloured:
                for i, method in enumerate(methods):
                    # A logarithmic axis has no zero: memory that did not grow is left out.
                    points = sorted((x, y) for x, y in panel.curves.get(method, {}).items() if y)
                    style = {"linestyle": DASHES[i % 4], "marker": MARKERS[i % 5], "color": colour}
                    axes.plot([x for x, _ in points], [y for _, y in points], label=method, **style)
            axes.set(title=panel.title, ylabel=panel.unit, xlabel=picture.x_label)
            axes.tick_params(axis="x", labelbottom=True, rotation=30)
            axes.grid(alpha=0.3)
            if any(value for points in panel.curves.values() for value in points.values()):
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.set_xticks(lengths, [f"{x:,}" for x in lengths])
                axes.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
        row[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=120)
