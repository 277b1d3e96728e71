"""The comparison as rows, as a table in text, CSV and Markdown, and as a figure."""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from hyena_jax import files
from hyena_jax.comparison.runs import Axis, Group, is_better
from hyena_jax.comparison.sizes import n_params, state_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#9A8B00", "#7F3C8D")
KIB = 2**10


@dataclass(frozen=True)
class Row:
    """What the runs of a group reached."""

    label: str
    metric: str
    n_runs: int
    last: tuple[float, ...]
    """The metric at the last evaluation of each run; NaN if it was not finite."""
    best: float
    """The best value at any evaluation of any run."""
    steps: tuple[int, ...]
    """The last step that was evaluated, of each run."""
    seconds: float
    """Median time of training to that step."""
    n_params: int
    state_bytes: int | None
    """Decoding state of a sequence of `model.max_len` tokens; None without one."""

    @property
    def mean(self) -> float:
        """Mean of `last`."""
        return statistics.fmean(self.last)

    @property
    def cells(self) -> dict[str, str]:
        """The row as text, by column."""
        spread = f"{min(self.last):.4f}-{max(self.last):.4f}" if self.n_runs > 1 else "-"
        return {
            "runs": str(self.n_runs),
            "mean": f"{self.mean:.4f}",
            "spread": spread,
            "best": f"{self.best:.4f}",
            "step": f"{statistics.median(self.steps):g}",
            "seconds": f"{self.seconds:.0f}",
            "parameters": f"{self.n_params:,}",
            "state KiB": "-" if self.state_bytes is None else f"{self.state_bytes / KIB:.1f}",
        }


def make_row(group: Group, metric: str) -> Row:
    """The row of a group; sizes are those of its first run."""
    curves = [run.held_out(metric) for run in group.runs]
    steps = tuple(max(curve) for curve in curves)
    best = math.inf if is_better(metric, 0, 1) else -math.inf
    for curve in curves:
        for value in curve.values():
            best = value if is_better(metric, value, best) else best
    return Row(
        label=group.label,
        metric=metric,
        n_runs=len(group.runs),
        last=tuple(curve[step] for curve, step in zip(curves, steps, strict=True)),
        best=best,
        steps=steps,
        seconds=statistics.median(
            run.seconds.get(step, math.nan) for run, step in zip(group.runs, steps, strict=True)
        ),
        n_params=n_params(group.runs[0].experiment.model),
        state_bytes=state_size(group.runs[0].experiment.model),
    )


def text_table(rows: Sequence[Row]) -> Table:
    """The table for a terminal."""
    table = Table("", *rows[0].cells, title=rows[0].metric, box=None, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(row.label, *row.cells.values())
    return table


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    lines = [f"| {rows[0].metric} | {' | '.join(rows[0].cells)} |", f"|---|{'---:|' * len(rows[0].cells)}"]
    lines += [f"| {row.label.replace('|', '/')} | {' | '.join(row.cells.values())} |" for row in rows]
    return "\n".join(lines) + "\n"


def comma_separated(rows: Sequence[Row]) -> str:
    """The table in CSV, with all digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = ["group", "runs", f"mean {rows[0].metric}", "least", "largest", "best", "step", "seconds"]
    writer.writerow([*header, "parameters", "state bytes"])
    for row in rows:
        values = [row.mean, min(row.last), max(row.last), row.best, statistics.median(row.steps), row.seconds]
        writer.writerow([row.label, row.n_runs, *values, row.n_params, row.state_bytes])
    return text.getvalue()


def draw(path: Path, groups: Sequence[Group], metric: str, x: Axis) -> None:
    """Draws the metric of each group against `x`: the mean over its runs, and a band from least to largest.

    With more groups than colours, each has its own panel, where the others are grey.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = {group.label: _curve(group, metric, x) for group in groups}
    alone = len(groups) > len(COLOURS)
    n_columns = min(4, len(groups)) if alone else 1
    n_rows = math.ceil(len(groups) / n_columns) if alone else 1
    size = (3.4 * n_columns, 2.6 * n_rows) if alone else (8, 4.8)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(n_rows, n_columns, squeeze=False, sharex=True, sharey=True).ravel()
    shown = [[group] for group in groups] if alone else [groups]
    for axes, members in zip(panels, shown, strict=False):
        if alone:
            for curve in curves.values():
                axes.plot(curve.x, curve.mean, color="#d0d0d0", linewidth=0.8)
        for i, group in enumerate(members):
            _draw_curve(axes, curves[group.label], group.label, COLOURS[0 if alone else i])
        axes.grid(alpha=0.25)
        if alone:
            axes.set_title(members[0].label, fontsize="small", parse_math=False)
        else:
            axes.legend(frameon=False, fontsize="small")
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    label = {"step": "step", "seconds": "seconds of training", "tokens": "tokens of training"}[x]
    figure.supxlabel(label, fontsize="medium")
    figure.supylabel(f"{metric.replace('_', ' ')}, held out", fontsize="medium")
    with files.replacing(path) as draft:
        figure.savefig(draft, format=path.suffix[1:], dpi=150)


@dataclass(frozen=True)
class _Curve:
    x: Sequence[float]
    mean: Sequence[float]
    least: Sequence[float]
    largest: Sequence[float]


def _curve(group: Group, metric: str, x: Axis) -> _Curve:
    """The runs of a group at the steps that they evaluated; a run that stopped early keeps its last value."""
    curves = [run.held_out(metric) for run in group.runs]
    match x:
        case "step":
            per_step = 1.0
        case "tokens":
            data = group.runs[0].experiment.data
            per_step = data.batch_size * data.seq_len
        case "seconds":
            per_step = statistics.median(
                run.seconds.get(max(curve), math.nan) / max(curve)
                for run, curve in zip(group.runs, curves, strict=True)
            )
    columns = []
    for step in sorted({step for curve in curves for step in curve}):
        values = [curve[max(at for at in curve if at <= step)] for curve in curves if min(curve) <= step]
        columns.append((step * per_step, statistics.fmean(values), min(values), max(values)))
    return _Curve(*zip(*columns, strict=True))


def _draw_curve(axes: "Axes", curve: _Curve, label: str, colour: str) -> None:
    axes.plot(curve.x, curve.mean, label=label.replace("$", r"\$"), color=colour, marker="o", markersize=2.5)
    axes.fill_between(curve.x, curve.least, curve.largest, color=colour, alpha=0.2, linewidth=0)


def write(output: Path, groups: Sequence[Group], rows: Sequence[Row], x: Axis) -> None:
    """Writes the figure to `output`, and the table beside it as .csv and .md."""
    draw(output, groups, rows[0].metric, x)
    files.write_text(output.with_suffix(".csv"), comma_separated(rows))
    files.write_text(output.with_suffix(".md"), markdown(rows))
