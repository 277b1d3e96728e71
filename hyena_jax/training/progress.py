"""What a person sees of a run: the table of parameters and the live bar."""

import math
import re
from types import TracebackType

import jax
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from hyena_jax.config import OptimizerConfig
from hyena_jax.training.optimizer import complete_groups, label_parameters, path_name


class Progress:
    """A bar with loss, validation loss, speed and time left. Without a terminal only lines are printed."""

    def __init__(self, console: Console, start: int, steps: int, unit: str):
        self._values = {"loss": float("nan"), "validation_loss": float("nan"), "speed": 0.0}
        self._rich = RichProgress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("validation {task.fields[validation_loss]:.4f}"),
            TextColumn("{task.fields[speed]:,.0f} " + f"{unit}s/s"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._rich.add_task("", total=steps, completed=start, **self._values)

    def __enter__(self) -> "Progress":
        self._rich.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._rich.stop()

    def advance(self, step: int) -> None:
        """Moves the bar to `step`."""
        self._rich.update(self._task, completed=step)

    def show(self, **values: float) -> None:
        """Updates `loss`, `validation_loss` or `speed` in the bar."""
        self._rich.update(self._task, **values)

    def line(self, text: str) -> None:
        """Prints a line that stays above the bar."""
        self._rich.console.print(text)


def parameter_table(params: optax.Params, config: OptimizerConfig) -> Table:
    """Every kind of parameter with shape, count, learning rate and decay; like blocks share a row."""
    rows: dict[tuple, int] = {}
    groups = complete_groups(config)
    labels = jax.tree.leaves(label_parameters(config.groups, params))
    for (path, leaf), label in zip(jax.tree_util.tree_leaves_with_path(params), labels, strict=True):
        name = re.sub(r"blocks_\d+", "blocks_*", path_name(path))
        key = (name, leaf.shape, groups[label].learning_rate, groups[label].weight_decay)
        rows[key] = rows.get(key, 0) + 1
    table = Table(box=None, header_style="bold")
    table.add_column("parameter", overflow="fold")
    for name in ("shape", "count", "peak lr", "decay"):
        table.add_column(name, justify="right", no_wrap=True)
    total = 0
    for (name, shape, rate, decay), copies in rows.items():
        count = copies * math.prod(shape)
        total += count
        size = " x ".join(map(str, shape))
        table.add_row(
            name, size if copies == 1 else f"{copies} of {size}", f"{count:,}", f"{rate:g}", f"{decay:g}"
        )
    table.add_row("total", "", f"{total:,}", style="bold")
    return table
