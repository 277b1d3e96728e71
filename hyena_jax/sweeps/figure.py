"""The runs of groups as curves: a line for the middle of a group, and a band for its range."""

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyena_jax.sweeps.runs import Axis, Group
from hyena_jax.system import files
from hyena_jax.system.errors import printable, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart, with a darker yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#9A8B00", "#7F3C8D")
MAX_SHOWN = 1e30
"""Larger values are left out, as those that are not finite are: the library can scale no axis to them."""
MAX_POINTS = 2000
"""About the most points of a curve: of more evaluations, evenly spaced ones are drawn."""
MAX_DRAWN = 64
"""Groups in a figure, where each has a panel."""
Points = Mapping[float, Sequence[float]]
"""The values of the runs of a group by their place on the horizontal axis, from left to right."""


def require_drawable(groups: Sequence[Group], x: Axis) -> None:
    """Raises UserError if the groups are too many to draw, or have no place on the horizontal axis."""
    allowed = f"at most {MAX_DRAWN}: name fewer runs, or group them by one of their settings"
    require(len(groups) <= MAX_DRAWN, "the groups of a figure", len(groups), allowed)
    for group in groups:
        if x == "seconds":
            known = all(len(run.seconds) > 1 for run in group.runs)
            require(known, "x", x, f"'step' where a run of {group.label} has logged one step only")
        if x == "tokens":
            sizes = {run.tokens_per_step for run in group.runs}
            why = "have no data.seq_len" if None in sizes else "differ in their tokens per step"
            allowed = f"'step' or 'seconds' where the runs of {group.label} {why}"
            require(len(sizes) == 1 and None not in sizes, "x", x, allowed)


def draw_curves(path: Path, groups: Sequence[Group], metric: str, x: Axis, is_new: bool = False) -> None:
    """Draws the metric of each group against `x`: the mean over its runs, and a band from least to largest.

    With more groups than colours, each has its own panel, where the others are grey.
    """
    from matplotlib.figure import Figure

    curves = {group.label: _points(group, metric, x) for group in groups}
    alone = len(groups) > len(COLOURS)
    n_columns = min(4, len(groups)) if alone else 1
    n_rows = math.ceil(len(groups) / n_columns) if alone else 1
    size = (3.4 * n_columns, 2.6 * n_rows) if alone else (8, 4.8)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(n_rows, n_columns, squeeze=False, sharex=True, sharey=True).ravel()
    shown = [[label] for label in curves] if alone else [[*curves]]
    for axes, labels in zip(panels, shown, strict=False):
        if alone:
            for points in curves.values():
                means = [statistics.fmean(values) for values in points.values()]
                axes.plot([*points], means, color="#d0d0d0", linewidth=0.8)
        for label, colour in zip(labels, COLOURS, strict=False):
            means = [statistics.fmean(values) for values in curves[label].values()]
            style = {"color": colour, "marker": "o", "markersize": 2.5 if len(means) > 1 else 7}
            axes.plot([*curves[label]], means, label=in_legend(label), **style)
            if len(means) == 1:  # no line shows it
                place = next(iter(curves[label])), means[0]
                axes.annotate(f"{means[0]:.4g}", place, (6, 4), textcoords="offset points", fontsize="small")
            fill_range(axes, curves[label], color=colour, alpha=0.2, linewidth=0)
        axes.grid(alpha=0.25)
        if alone:
            axes.set_title(printable(labels[0]), fontsize="small", parse_math=False)
        else:
            axes.legend(frameon=False, fontsize="small")
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    label = {"step": "step", "seconds": "seconds of training", "tokens": "tokens of training"}[x]
    figure.supxlabel(label, fontsize="medium")
    figure.supylabel(f"{metric.replace('_', ' ')}, held out", fontsize="medium")
    save_figure(figure, path, 150, is_new)


def _points(group: Group, metric: str, x: Axis) -> Points:
    """The runs of a group at the steps that they evaluated; a run that stopped early keeps its last value."""
    curves = [
        {step: value if abs(value) <= MAX_SHOWN else math.nan for step, value in run.held_out(metric).items()}
        for run in group.runs
    ]
    match x:
        case "step":
            per_step = 1.0
        case "tokens":
            per_step = group.runs[0].tokens_per_step
        case "seconds":
            per_step = statistics.median(
                run.seconds.get(max(curve), math.nan) / max(curve)
                for run, curve in zip(group.runs, curves, strict=True)
            )
    steps = sorted({step for curve in curves for step in curve})
    steps = steps[:: -1 - len(steps) // MAX_POINTS][::-1]  # with the last
    evaluated = [sorted(curve) for curve in curves]
    return {
        step * per_step: [
            curve[at[bisect_right(at, step) - 1]]
            for curve, at in zip(curves, evaluated, strict=True)
            if at[0] <= step
        ]
        for step in steps
    }


def in_legend(label: str) -> str:
    """The label as a legend shows it, which leaves out those that begin with `_`, and reads `$` as TeX."""
    text = printable(label).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def fill_range(axes: "Axes", points: Points, **style: Any) -> None:
    """Fills the range from the least to the largest value at each place; `style` as in `fill_between`."""
    least, largest = (list(map(of, points.values())) for of in (np.min, np.max))
    axes.fill_between([*points], least, largest, **style)


def save_figure(figure: "Figure", path: Path, dpi: int, is_new: bool = False) -> None:
    """Writes the figure, whole or not at all, in the format of the file's ending; see `files.replacing`."""
    with files.replacing(path, is_new) as draft:
        figure.savefig(draft, format=path.suffix[1:], dpi=dpi)
