"""Results for people and programs: tables, JSON, a plot."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from hyena_jax.benchmark.decode import DecodeRow
from hyena_jax.benchmark.model import ModelRow
from hyena_jax.benchmark.operators import BOTH, FILTER, FORWARD, Row
from hyena_jax.benchmark.programs import Measured
from hyena_jax.benchmark.settings import PLOT, RESULTS
from hyena_jax.benchmark.timing import Timing

# By method: a value by length.
Curves = Mapping[str, Mapping[int, float]]
MIB = 2**20


def operators_table(rows: Sequence[Row]) -> Table:
    """One line a method and length; times are medians, with the quartiles behind."""
    table = _table(
        "method",
        "length",
        "forward ms",
        "forward + backward ms",
        "filter ms",
        "compile s",
        "MiB planned",
        "MiB live",
        "GFLOP",
        "by XLA",
        "roofline",
    )
    for row in rows:
        both = row.passes[BOTH]
        table.add_row(
            row.method,
            f"{row.length:,}",
            milliseconds(row.passes[FORWARD].seconds),
            milliseconds(both.seconds),
            milliseconds(row.passes[FILTER].seconds) if FILTER in row.passes else "",
            _number(both.compile_seconds, ".1f"),
            _number(both.compiled_bytes, ",.1f", MIB),
            _number(both.live_bytes, ",.1f", MIB),
            _number(both.flops, ",.3g", 1e9),
            _number(both.xla_flops, ",.3g", 1e9),
            _number(both.roofline_share, ".1%"),
        )
    return table


def model_table(rows: Sequence[ModelRow], unit: str) -> Table:
    """One line a pass and length."""
    table = _table(
        "pass",
        "length",
        "ms",
        f"{unit}s/s",
        "compile s",
        "MiB planned",
        "MiB live",
        "GFLOP by XLA",
    )
    for row in rows:
        for name, measured in row.passes.items():
            table.add_row(
                name.replace("_", " "),
                f"{row.length:,}",
                milliseconds(measured.seconds),
                f"{row.units / measured.seconds.median:,.0f}",
                _number(measured.compile_seconds, ".1f"),
                _number(measured.compiled_bytes, ",.1f", MIB),
                _number(measured.live_bytes, ",.1f", MIB),
                _number(measured.xla_flops, ",.3g", 1e9),
            )
    return table


def decode_table(rows: Sequence[DecodeRow]) -> Table:
    """One line a mixer, context and batch size."""
    table = _table(
        "mixer",
        "context",
        "batch",
        "prefill ms",
        "ms/token",
        "tokens/s",
        "state MiB",
        "MiB planned",
        "compile s",
    )
    for row in rows:
        table.add_row(
            row.method,
            f"{row.context:,}",
            str(row.batch),
            milliseconds(row.prefill.seconds),
            milliseconds(row.step),
            f"{row.tokens_per_second:,.0f}",
            f"{row.state_bytes / MIB:,.2f}",
            _number(row.prefill.compiled_bytes, ",.1f", MIB),
            f"{row.prefill.compile_seconds + row.step_compile_seconds:.1f}",
        )
    return table


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


def write(folder: Path, results: Mapping[str, Any], time: Curves, memory: Curves, titles: tuple) -> None:
    """`results.json` and `plot.png` in `folder`, which is made if it is missing.

    Args:
      time: seconds by method and length.
      memory: bytes likewise.
      titles: what each of these is, and what the length is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, default=_to_json)
    (folder / RESULTS).write_text(text + "\n", encoding="utf-8")
    draw(folder / PLOT, time, memory, titles)


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


def _table(first: str, *names: str) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "" if value is None else format(value / unit, form)


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        timings = {name: part._asdict() for name, part in fields.items() if isinstance(part, Timing)}
        return fields | timings
    raise TypeError(f"{value!r} is no JSON")
