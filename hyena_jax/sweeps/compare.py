"""`hyena_jax.compare`, and what `hyena-jax compare` prints."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from hyena_jax.sweeps import figure
from hyena_jax.sweeps.runs import Axis, choose_metric, group, is_better, read_runs
from hyena_jax.sweeps.table import GroupSummary, comma_separated, markdown, summarise
from hyena_jax.system import files
from hyena_jax.system.errors import choose, require
from hyena_jax.system.files import require_new_file

FORMATS = (".png", ".pdf", ".svg")


def compare(
    folders: str | Path | Sequence[str | Path],
    *,
    by: str | None = None,
    metric: str | None = None,
    x: Axis = "step",
    output: str | Path | None = None,
    note: Callable[[str], None] = print,
) -> list[GroupSummary]:
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

    >>> for row in hyena_jax.compare("runs/recall", by="optimizer.learning_rate"):
    ...     print(row.label, row.metric, row.steps)
    optimizer.learning_rate=0.002 accuracy (2,)
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
        figure.check(groups, x)
    sign = -1 if is_better(metric, 1, 0) else 1
    found = [(members, summarise(members, metric)) for members in groups]
    # What is not finite has no place among the others: last.
    found.sort(key=lambda pair: (math.isnan(pair[1].mean), sign * pair[1].mean))
    groups, rows = ([*column] for column in zip(*found, strict=True))
    if path is not None:
        figure.draw(path, groups, metric, x)
        files.write_text(path.with_suffix(".csv"), comma_separated(rows))
        lines = markdown(metric, [*rows[0].cells], [(row.label, [*row.cells.values()]) for row in rows])
        files.write_text(path.with_suffix(".md"), "\n".join(lines) + "\n")
    return rows
