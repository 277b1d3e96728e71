"""`hyena_jax.compare`, and what `hyena-jax compare` prints."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from hyena_jax.comparison.report import Row, make_row, write
from hyena_jax.comparison.runs import Axis, Group, choose_metric, group, is_better, read_runs
from hyena_jax.config import choose, require
from hyena_jax.files import require_new_file

FORMATS = (".png", ".pdf", ".svg")
MAX_DRAWN = 64
"""Groups in a figure, where each has a panel."""


def compare(
    folders: str | Path | Sequence[str | Path],
    *,
    by: str | None = None,
    metric: str | None = None,
    x: Axis = "step",
    output: str | Path | None = None,
    note: Callable[[str], None] = print,
) -> list[Row]:
    """What the runs in `folders` reached, a row for each group of runs, the best mean first.

    Args:
      folders: folders of runs, or folders with runs in them, such as a sweep's; or one such folder.
      by: a setting such as `variant` or `optimizer.learning_rate`: runs with the same value form a group.
        None groups runs that differ only in their seed.
      metric: a value on held-out data; None takes the first accuracy, or the loss.
      x: what the figure is drawn against.
      output: file of the figure (.png, .pdf or .svg); the table is written next to it as .csv and .md.
      note: called with a line about runs that were left out because they have not been evaluated.

    Raises:
      UserError: if a folder holds no run, a run lacks the setting or the metric, or a file exists already.
    """
    choose("x", x, dict.fromkeys(get_args(Axis)))
    path = None if output is None else Path(output)
    if path is not None:
        require(path.suffix in FORMATS, "output", str(path), f"a file that ends in {', '.join(FORMATS)}")
        for file in (path, path.with_suffix(".csv"), path.with_suffix(".md")):
            require_new_file("output", file)
    runs, left_out = read_runs(folders)
    if left_out:
        note(f"not evaluated yet, and left out: {', '.join(left_out)}")
    metric = choose_metric(runs, metric)
    groups = group(runs, by)
    if path is not None:
        _check_figure(path, groups, x)
    rows = {members.label: make_row(members, metric) for members in groups}
    sign = -1 if is_better(metric, 1, 0) else 1
    # What is not finite has no place among the others: last.
    order = sorted(rows, key=lambda label: (math.isnan(rows[label].mean), sign * rows[label].mean))
    groups.sort(key=lambda members: order.index(members.label))
    ordered = [rows[label] for label in order]
    if path is not None:
        write(path, groups, ordered, x)
    return ordered


def _check_figure(path: Path, groups: Sequence[Group], x: Axis) -> None:
    """Raises UserError if the groups are too many to draw, or have no place on the horizontal axis."""
    allowed = f"left out: {len(groups)} groups are more than a figure holds, {MAX_DRAWN}"
    require(len(groups) <= MAX_DRAWN, "output", str(path), allowed)
    for members in groups:
        if x == "seconds":
            known = all(len(run.seconds) > 1 for run in members.runs)
            require(known, "x", x, f"step: {members.label} has a run with rows at a single step")
        if x == "tokens":
            data = [run.experiment.data for run in members.runs]
            has_length = all(hasattr(settings, "seq_len") for settings in data)
            require(has_length, "x", x, f"step or seconds: {members.label} has rows without data.seq_len")
            sizes = {settings.batch_size * settings.seq_len for settings in data}
            allowed = f"step or seconds: the runs of {members.label} differ in their tokens per step"
            require(len(sizes) == 1, "x", x, allowed)
