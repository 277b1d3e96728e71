"""Results for people and programs: tables, JSON, a plot."""

import dataclasses
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hyena_jax.benchmark.decode import DecodeRow
from hyena_jax.benchmark.model import ModelRow
from hyena_jax.benchmark.operators import BOTH, FILTER, FORWARD, Row
from hyena_jax.benchmark.programs import Measured
from hyena_jax.benchmark.settings import RESULTS
from hyena_jax.benchmark.timing import Timing
from hyena_jax.training.atomic import write_text

# By method: a value by length.
Curves = Mapping[str, Mapping[int, float]]
MIB = 2**20


# One line of a table: cells by the names of their columns.
Cells = dict[str, str]


def operators_cells(row: Row) -> Iterator[Cells]:
    """The line of a method and length; times are medians, with the quartiles behind."""
    both = row.passes[BOTH]
    yield {
        "method": row.method,
        "length": f"{row.length:,}",
        "forward ms": milliseconds(row.passes[FORWARD].seconds),
        "forward + backward ms": milliseconds(both.seconds),
        "filter ms": milliseconds(row.passes[FILTER].seconds) if FILTER in row.passes else "",
        "compile s": _number(both.compile_seconds, ".1f"),
        "MiB planned": _number(both.compiled_bytes, ",.1f", MIB),
        "MiB live": _number(both.live_bytes, ",.1f", MIB),
        "GFLOP": _number(both.flops, ",.3g", 1e9),
        "by XLA": _number(both.xla_flops, ",.3g", 1e9),
        "roofline": _number(both.roofline_share, ".1%"),
    }


def model_cells(unit: str, row: ModelRow) -> Iterator[Cells]:
    """A line for each pass at one length."""
    for name, measured in row.passes.items():
        yield {
            "pass": name.replace("_", " "),
            "length": f"{row.length:,}",
            "ms": milliseconds(measured.seconds),
            f"{unit}s/s": f"{row.units / measured.seconds.median:,.0f}",
            "compile s": _number(measured.compile_seconds, ".1f"),
            "MiB planned": _number(measured.compiled_bytes, ",.1f", MIB),
            "MiB live": _number(measured.live_bytes, ",.1f", MIB),
            "GFLOP by XLA": _number(measured.xla_flops, ",.3g", 1e9),
        }


def decode_cells(row: DecodeRow) -> Iterator[Cells]:
    """The line of a mixer, context and batch size."""
    yield {
        "mixer": row.method,
        "context": f"{row.context:,}",
        "batch": str(row.batch),
        "prefill ms": milliseconds(row.prefill.seconds),
        "ms/token": milliseconds(row.step),
        "tokens/s": f"{row.tokens_per_second:,.0f}",
        "state MiB": f"{row.state_bytes / MIB:,.2f}",
        "MiB planned": _number(row.prefill.compiled_bytes, ",.1f", MIB),
        "compile s": f"{row.prefill.compile_seconds + row.step_compile_seconds:.1f}",
    }


def line(cells: Cells) -> str:
    """A line of a table that is printed before the next one is known: columns have fixed widths."""
    first, *others = cells
    return "  ".join([cells[first].ljust(22), *(cells[name].rjust(_width(name)) for name in others)])


def _width(column: str) -> int:
    """Of times with their quartiles, such as `1,234 (1,200-1,301)`, or of plain numbers."""
    return max(len(column), 19 if "ms" in re.split("[ /]", column) else 8)


def milliseconds(timing: Timing) -> str:
    """Median and quartiles, to three digits."""
    lower, median, upper = (_digits(1e3 * s) for s in (timing.lower, timing.median, timing.upper))
    return f"{median} ({lower}-{upper})" if timing.runs > 1 else f"{median} (1 run)"


def time_curves(rows: Sequence[Row], part: str) -> dict[str, dict[int, float]]:
    """Median seconds of a pass by method and length."""
    return _curves((row.method, row.length, row.passes[part].seconds.median) for row in rows)


def memory_curves(rows: Sequence[Row], part: str) -> dict[str, dict[int, float]]:
    """Bytes of a pass by method and length."""
    return _curves((row.method, row.length, memory_of(row.passes[part])) for row in rows)


def model_curves(rows: Sequence[ModelRow]) -> tuple[Curves, Curves]:
    """Seconds and bytes of each pass by length."""
    passes = [(name, row.length, measured) for row in rows for name, measured in row.passes.items()]
    time = _curves((name, length, measured.seconds.median) for name, length, measured in passes)
    return time, _curves((name, length, memory_of(measured)) for name, length, measured in passes)


def decode_curves(rows: Sequence[DecodeRow]) -> tuple[Curves, Curves]:
    """Seconds of a step and bytes of the state, of each mixer and batch size, by context."""
    names = [f"{row.method}, batch {row.batch}" for row in rows]
    named = list(zip(names, rows, strict=True))
    time = _curves((name, row.context, row.step.median) for name, row in named)
    return time, _curves((name, row.context, row.state_bytes) for name, row in named)


def memory_of(measured: Measured) -> float | None:
    """Bytes as planned; of a program that nothing planned, as seen."""
    return measured.live_bytes if measured.compiled_bytes is None else measured.compiled_bytes


def _curves(points: Iterable[tuple[str, int, float | None]]) -> dict[str, dict[int, float]]:
    by_method: dict[str, dict[int, float]] = {}
    for method, length, value in points:
        if value is not None:
            by_method.setdefault(method, {})[length] = value
    return by_method


def check_writable(folder: Path) -> None:
    """Raises OSError if nothing can be written in the folder, or it cannot be made; leaves nothing behind."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with tempfile.TemporaryFile(dir=existing):
        pass


def write(folder: Path, results: Mapping[str, Any]) -> None:
    """`results.json` in `folder`, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RESULTS, json.dumps(results, indent=1, default=_to_json) + "\n")


def draw(path: Path, time: Curves, memory: Curves, titles: tuple[str, str, str]) -> None:
    """Two panels, both axes logarithmic, a line for each method."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = ((time, f"{titles[0]}, ms", 1e-3), (memory, f"{titles[1]}, MiB", MIB))
    for axes, (by_method, label, unit) in zip(figure.subplots(1, 2), panels, strict=True):
        for i, (method, points) in enumerate(by_method.items()):
            # Nothing is where a logarithm is not: memory that did not grow.
            kept = {length: value / unit for length, value in sorted(points.items()) if value}
            # Ten colours, and then the next marker.
            marker, color = "osD^vx"[i // 10 % 6], f"C{i % 10}"
            axes.plot(list(kept), list(kept.values()), marker=marker, color=color, label=method)
        if any(value for points in by_method.values() for value in points.values()):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        axes.set(xlabel=titles[2], ylabel=label)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.tick_params(axis="x", rotation=45)
        axes.grid(alpha=0.3)
    figure.axes[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "" if value is None else format(value / unit, form)


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        timings = {name: part._asdict() for name, part in fields.items() if isinstance(part, Timing)}
        return fields | timings
    raise TypeError(f"{value!r} cannot be written as JSON")
