"""What groups of runs reached, as `hyena_jax.compare` returns it and `hyena-jax compare` prints it."""

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import jax
import numpy as np
from rich.table import Table

from hyena_jax import models
from hyena_jax.config import ModelConfig
from hyena_jax.sweeps import figure
from hyena_jax.sweeps.runs import Axis, Group, choose_metric, group, is_better, read_runs
from hyena_jax.system import files
from hyena_jax.system.errors import choose, printable, require
from hyena_jax.system.files import require_new_file
from hyena_jax.system.trees import n_entries
from hyena_jax.training.step import init_params

FORMATS = (".png", ".pdf", ".svg")
KIB = 2**10


@dataclass(frozen=True)
class GroupSummary:
    """What the runs of a group reached."""

    label: str
    metric: str
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
    def n_runs(self) -> int:
        """Number of runs."""
        return len(self.last)

    @property
    def mean(self) -> float:
        """Mean of `last`."""
        return statistics.fmean(self.last)

    @property
    def least(self) -> float:
        """Least of `last`; NaN if one is."""
        return float(np.min(self.last))

    @property
    def largest(self) -> float:
        """Largest of `last`; NaN if one is."""
        return float(np.max(self.last))

    @property
    def cells(self) -> dict[str, str]:
        """The row of the table, by column."""
        spread = f"{_short(self.least)}-{_short(self.largest)}" if self.n_runs > 1 else "-"
        return {
            "runs": str(self.n_runs),
            "mean": _short(self.mean),
            "spread": spread,
            "best": _short(self.best),
            **self.costs,
        }

    @property
    def costs(self) -> dict[str, str]:
        """The last columns: what the runs took, and the sizes of the model."""
        return {
            "step": f"{statistics.median(self.steps):g}",
            "seconds": f"{self.seconds:.0f}",
            "parameters": f"{self.n_params:,}",
            "state KiB": "-" if self.state_bytes is None else f"{self.state_bytes / KIB:.1f}",
        }


def compare(
    folders: str | Path | Sequence[str | Path],
    *,
    by: str | Sequence[str] | None = None,
    best_by: str | None = None,
    metric: str | None = None,
    x: Axis = "step",
    output: str | Path | None = None,
    overwrite: bool = False,
    note: Callable[[str], None] = print,
) -> list[GroupSummary]:
    """What the runs in `folders` reached, a row for each group of runs, the best mean first.

    Args:
      folders: folders of runs, or folders with runs in them, such as a sweep's; or one such folder.
      by: a setting such as `variant` or `optimizer.learning_rate`: runs with the same value form a group.
        Several such settings together, too. None groups runs that differ only in their seed.
      best_by: a setting, such as `optimizer.learning_rate`: of groups that differ in nothing else, or not in
        `by`, the one with the best mean remains.
      metric: a value on held-out data; None takes the loss of language models, else the first accuracy, or
        the loss.
      x: what the figure is drawn against.
      output: file of the figure (.png, .pdf or .svg); the table is written next to it as .csv and .md.
      overwrite: replace these files; else the figure must be new, and tables that are there be the same.
      note: called with a line about runs that were left out because they have not been evaluated, and about
        groups of different models.

    Raises:
      UserError: if a folder holds no run, a run lacks the setting or the metric, or a file exists already.

    >>> for row in hyena_jax.compare("runs/recall", by="optimizer.learning_rate"):
    ...     print(row.label, row.metric, row.steps)
    optimizer.learning_rate=0.002 accuracy (2,)
    """
    choose("x", x, dict.fromkeys(get_args(Axis)))
    path = None if output is None else Path(output)
    if path is not None:
        require(path.suffix in FORMATS, "output", str(path), f"a file that ends in {', '.join(FORMATS)}")
        if not (overwrite and path.is_file()):
            require_new_file("output", path)
    runs, left_out = read_runs(folders)
    if left_out:
        note(f"not evaluated yet, and left out: {', '.join(left_out)}")
    metric = choose_metric(runs, metric)
    by = (by,) if isinstance(by, str) else tuple(by or ())
    groups = group(runs, (*by, *filter(None, [best_by])) if by else (), best_by)
    sign = -1 if is_better(metric, 1, 0) else 1
    found = [(members, summarise(members, metric)) for members in groups]
    # What is not finite has no place among the others: last.
    found.sort(key=lambda pair: (math.isnan(pair[1].mean), sign * pair[1].mean))
    if best_by is not None:
        best: dict[object, tuple[Group, GroupSummary]] = {}
        for members, row in found:
            best.setdefault(members.runs[0].settings_but(best_by, by), (members, row))
        found = [*best.values()]
    groups, rows = ([*column] for column in zip(*found, strict=True))
    for members in groups:
        first, *others = (run.experiment.model for run in members.runs)
        if any(other != first for other in others):
            note(f"{members.label} has runs of different models: sizes are those of {members.runs[0].name}")
    if path is not None:
        figure.require_drawable(groups, x)
        lines = markdown(metric, [*rows[0].cells], [(row.label, [*row.cells.values()]) for row in rows])
        tables = {
            path.with_suffix(".csv"): comma_separated(rows),
            path.with_suffix(".md"): "\n".join([*lines, ""]),
        }
        for file, text in tables.items():
            is_same = file.is_file() and file.read_bytes() == text.encode()  # beside another figure's format
            if not is_same and not (overwrite and file.is_file()):
                require_new_file("output", file)
        figure.draw_curves(path, groups, metric, x, is_new=not overwrite)
        for file, text in tables.items():
            files.write_text(file, text, is_new=not file.exists())
    return rows


def summarise(group: Group, metric: str) -> GroupSummary:
    """What the runs of a group reached; sizes are those of its first run."""
    curves = [run.held_out(metric) for run in group.runs]
    steps = tuple(max(curve) for curve in curves)
    best = math.inf if is_better(metric, 0, 1) else -math.inf
    for curve in curves:
        for value in curve.values():
            best = value if is_better(metric, value, best) else best
    return GroupSummary(
        label=group.label,
        metric=metric,
        last=tuple(curve[step] for curve, step in zip(curves, steps, strict=True)),
        best=best,
        steps=steps,
        seconds=statistics.median(
            run.seconds.get(step, math.nan) for run, step in zip(group.runs, steps, strict=True)
        ),
        n_params=n_params(group.runs[0].experiment.model),
        state_bytes=state_size(group.runs[0].experiment.model),
    )


def n_params(config: ModelConfig) -> int:
    """The number of parameters."""
    model = models.build(config)
    return n_entries(jax.eval_shape(lambda: init_params(model, 0)))


def state_size(config: ModelConfig) -> int | None:
    """The bytes of decoding state that a sequence of `max_len` tokens takes; None without such a state.

    What all sequences share, such as evaluated filters, does not count.
    """
    model = models.build(config)
    if not config.input_kind.is_tokens or not models.decodes_by_state(model):
        return None
    shapes = jax.eval_shape(lambda: init_params(model, 0))

    def size(batch_size: int) -> int:
        state = jax.eval_shape(
            lambda params: model.apply({"params": params}, batch_size, config.max_len, method="init_state"),
            shapes,
        )
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    return size(2) - size(1)


def _short(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def text_table(rows: Sequence[GroupSummary]) -> Table:
    """The table for a terminal."""
    table = Table("", *rows[0].cells, title=rows[0].metric, box=None, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(row.label, *row.cells.values())
    return table


def markdown(corner: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """The lines of a table in Markdown; each row is a label and its cells."""
    lines = [f"| {corner} | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    return lines + [
        f"| {printable(label).replace('|', '/')} | {' | '.join(cells)} |" for label, cells in rows
    ]


def comma_separated(rows: Sequence[GroupSummary]) -> str:
    """The table in CSV, with all digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = ["group", "runs", f"mean {rows[0].metric}", "least", "largest", "best", "step", "seconds"]
    writer.writerow([*header, "parameters", "state bytes"])
    for row in rows:
        values = [row.mean, row.least, row.largest, row.best, statistics.median(row.steps), row.seconds]
        writer.writerow([row.label, row.n_runs, *values, row.n_params, row.state_bytes])
    return text.getvalue()
