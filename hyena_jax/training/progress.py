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

from hyena_jax.config import GroupedOptimizerConfig, OptimizerConfig
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
    """Every kind of parameter with shape and count; like blocks share a row.

    With groups also the learning rate and decay of each, and the optional groups that match nothing.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    rules, headers, caption = _rules(params, config)
    rows: dict[tuple, int] = {}
    for (path, leaf), rule in zip(leaves, rules, strict=True):
        name = re.sub(r"blocks_\d+", "blocks_*", path_name(path))
        rows[name, leaf.shape, rule] = rows.get((name, leaf.shape, rule), 0) + 1
    table = Table(box=None, header_style="bold", caption=caption, caption_justify="left")
    table.add_column("parameter", overflow="fold")
    for name in ("shape", "count", *headers):
        table.add_column(name, justify="right", no_wrap=True)
    total = 0
    for (name, shape, rule), copies in rows.items():
        count = copies * math.prod(shape)
        total += count
        size = " x ".join(map(str, shape))
        size = size if copies == 1 else f"{copies} of {size}"
        table.add_row(name, size, f"{count:,}", *(f"{value:g}" for value in rule))
    table.add_row("total", "", f"{total:,}", style="bold")
    return table


def _rules(params: optax.Params, config: OptimizerConfig) -> tuple[list, tuple[str, ...], str | None]:
    """What an optimizer does with each parameter, under which headers, and what to say below the table."""
    if not isinstance(config, GroupedOptimizerConfig):
        return [()] * len(jax.tree.leaves(params)), (), None
    groups = complete_groups(config)
    labels = jax.tree.leaves(label_parameters(config.groups, params))
    rules = [(groups[label].learning_rate, groups[label].weight_decay) for label in labels]
    unused = [repr(group.pattern) for i, group in enumerate(config.groups) if i not in labels]
    caption = f"optimizer.groups that match no parameter: {', '.join(unused)}" if unused else None
    return rules, ("peak lr", "decay"), caption
