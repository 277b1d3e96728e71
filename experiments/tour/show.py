"""What the notebooks share: their pictures, and the source of the functions that they talk about.

A notebook says what is drawn; how it looks is decided here and in tour.mplstyle.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

plt.style.use(Path(__file__).with_name("tour.mplstyle"))

STYLES = {
    "pale": {"color": "0.75"},
    "thick": {"color": "0.75", "linewidth": 4},
    "steps": {"drawstyle": "steps-mid"},
}
"""Styles of `lines` in addition to matplotlib's formats; what others lie upon is thick."""


class Code(NamedTuple):
    """Source text that a notebook displays with colours."""

    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"


def code(*functions: Callable) -> Code:
    """The source of each function, below its full name; of docstrings the first line."""
    return Code("\n\n".join(map(_source, functions)))


def _source(function: Callable) -> str:
    function = inspect.unwrap(function)
    text = textwrap.dedent(inspect.getsource(function))
    lines, first = text.splitlines(), ast.parse(text).body[0].body[0]
    if isinstance(first, ast.Expr) and first.end_lineno > first.lineno:
        lines[first.lineno - 1 : first.end_lineno] = [lines[first.lineno - 1] + '"""']
    return "\n".join([f"# {function.__module__}:{function.__qualname__}", *lines])


def panels(n_columns: int, n_rows: int = 1, height: float = 2.5, **options: Any) -> Any:
    """Axes to draw on, as `plt.subplots` returns them: one, or an array."""
    return plt.subplots(n_rows, n_columns, figsize=(8, height), **options)[1]


def lines(
    curves: Any,
    x: Sequence | None = None,
    styles: Sequence[str] = (),
    logs: str = "",
    ax: Axes | None = None,
    **labels: Any,
) -> None:
    """Draws curves.

    Args:
      curves: y [n] or, by label, several; (x, y) is a curve with its own x, a number a horizontal line.
      x: of all curves; 0, 1, ... by default.
      styles: of one curve after the other: see `STYLES`, or a format of matplotlib.
      logs: the axes with logarithmic scales: "x", "y" or "xy".
      labels: what `Axes.set` takes, such as xlabel.
    """
    ax = ax or panels(1)
    named = curves if isinstance(curves, Mapping) else {None: curves}
    for (label, curve), style in zip_longest(named.items(), styles[: len(named)], fillvalue=""):
        options = {"label": label, **STYLES.get(style, {})}
        if np.ndim(curve) == 0:
            ax.axhline(curve, color="0.5", linestyle=style or "-", label=label)
            continue
        along, y = curve if isinstance(curve, tuple) else (range(len(curve)) if x is None else x, curve)
        ax.plot(along, y, "" if style in STYLES else style, **options)
    if "x" in logs:
        ax.set_xscale("log", base=2)
    if "y" in logs:
        ax.set_yscale("log")
    ax.set(**labels)
    if None not in named:
        ax.legend()


def bars(
    heights: Any,
    names: Sequence | None = None,
    marked: int | None = None,
    ax: Axes | None = None,
    **labels: Any,
) -> None:
    """Draws bars of heights [n], or stacks of several by label.

    Args:
      names: below each bar.
      marked: the bar in another colour.
      labels: what `Axes.set` takes.
    """
    ax = ax or panels(1)
    named = heights if isinstance(heights, Mapping) else {None: heights}
    below = 0
    for label, height in named.items():
        drawn = ax.bar(range(len(height)), height, bottom=below, label=label)
        below = below + np.asarray(height)
    if marked is not None:
        drawn[marked].set_color("C1")
    if names is not None:
        ax.set_xticks(range(len(names)), names, fontsize=8, family="monospace")
    ax.set(**labels)
    if None not in named:
        ax.legend()


def matrices(
    shown: Mapping[str, np.ndarray],
    limit: float | None = None,
    bar: str | None = None,
    cmap: str = "RdBu_r",
    n_rows: int = 1,
    height: float = 2.6,
    aspect: str = "equal",
    names: Sequence | None = None,
    ax: Axes | None = None,
    **labels: Any,
) -> None:
    """Draws matrices by title, side by side.

    Args:
      limit: the value with the strongest colour; None is the largest of each matrix.
      bar: label of a colour bar.
      cmap: colours; those of RdBu_r, in which 0 is white, are for both signs, others begin at 0.
      aspect: "auto" stretches a matrix over its panel.
      names: of the columns, and of the rows of square matrices.
      labels: what `Axes.set` takes.
    """
    axes = np.array([[ax]])
    if ax is None:
        options = {"sharex": True, "sharey": True, "squeeze": False, "layout": "compressed"}
        axes = panels(-(-len(shown) // n_rows), n_rows, height, **options)
    for panel, (title, matrix) in zip(axes.flat, shown.items(), strict=True):
        most = limit or np.nanmax(np.abs(matrix))
        image = panel.imshow(
            matrix, cmap=cmap, vmin=-most if cmap == "RdBu_r" else 0, vmax=most, aspect=aspect
        )
        panel.set(title=title, **labels)
        panel.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
        if names is not None:
            panel.set_xticks(range(len(names)), names, fontsize=7, family="monospace")
        if names is not None and matrix.shape[0] == matrix.shape[1]:
            panel.set_yticks(range(len(names)), names, fontsize=7, family="monospace")
        if ax is None:
            panel.label_outer()
    if bar:
        axes.flat[0].figure.colorbar(image, ax=axes, label=bar)
