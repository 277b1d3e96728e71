"""The output of a run: what is trained, and a progress bar, or rows of text without a terminal."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import jax
import optax
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from hyena_jax import models
from hyena_jax.config import GroupedOptimizerConfig, OptimizerConfig, WarmupScheduleConfig
from hyena_jax.system.output import VALUES, Bar
from hyena_jax.system.trees import named_leaves
from hyena_jax.training import lora
from hyena_jax.training.optimizer import complete_groups, label_parameters
from hyena_jax.training.setup import Setup

# Least seconds between two rows of training metrics, without a terminal.
ROW_EVERY = 5.0


class Progress(Bar):
    """A progress bar with loss, validation loss, speed and time left; without a terminal, rows of text.

    Where nobody reads the output any more, as after `| head`, `is_unread` becomes True instead of an error,
    so that the last steps can be saved.
    """

    is_unread = False

    def __init__(self, console: Console, start: int, steps: int, unit: str):
        columns = (MofNCompleteColumn(), VALUES, TimeRemainingColumn())
        super().__init__(console, "compiling", steps, *columns, done=start)
        self._steps, self._unit = steps, unit
        self._loss = self._validation_loss = self._speed = ""

    def __enter__(self) -> "Progress":
        if not self._console.is_terminal:
            self._console.print("compiling the training step")
        return super().__enter__()

    def advance(self, step: int) -> None:
        """Moves the bar to `step`."""
        self.show(step, "training")

    def training(self, step: int, loss: float, speed: float | None) -> None:
        """Shows the loss of `step`, and the speed in units a second; None: it is not known yet."""
        self._loss, self._speed = f"loss {loss:.4f}", "" if speed is None else f"{speed:,.0f} {self._unit}s/s"
        self._show_values()
        if self.is_row_due(ROW_EVERY, is_last=step == self._steps):
            shown = (f"step {step:6d}", self._loss, self._speed, self.left(step))
            self.note("   ".join(filter(None, shown)))

    def validation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Shows the validation loss after `step`, also as a row of text, with the experiment's metrics."""
        self._validation_loss = f"validation {loss:.4f}"
        self._show_values()
        more = "".join(f"   {name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())
        self.note(f"step {step:6d}   validation loss {loss:.4f}{more}")

    def note(self, text: str) -> None:
        """Prints a line."""
        try:
            self._console.print(text, soft_wrap=True)
        except BrokenPipeError:
            self.is_unread = True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Shows `evaluating` while the bar stands still."""
        self.show(what="evaluating")
        yield
        self.show(what="training")

    def _show_values(self) -> None:
        self.show(values="  ".join(filter(None, (self._loss, self._validation_loss, self._speed))))


def parameter_table(params: optax.Params, config: OptimizerConfig) -> Table:
    """Every parameter with shape and count; equal parameters of all blocks share a row.

    With parameter groups, also their learning rate and decay, and the optional groups that match nothing.
    """
    leaves = named_leaves(params)
    rules, headers, caption = [()] * len(leaves), (), None
    if isinstance(config, GroupedOptimizerConfig):
        groups = complete_groups(config)
        labels = jax.tree.leaves(label_parameters(config.groups, params))
        rules = [(groups[label].learning_rate, groups[label].weight_decay) for label in labels]
        headers = ("peak lr", "decay")
        unused = [repr(group.pattern) for i, group in enumerate(config.groups) if i not in labels]
        caption = f"optimizer.groups that match no parameter: {', '.join(unused)}" if unused else None
    rows: dict[tuple, int] = {}
    for (path, leaf), rule in zip(leaves.items(), rules, strict=True):
        name = re.sub(r"blocks_\d+", "blocks_*", path)
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


def announce(console: Console, setup: Setup, is_new: bool, changes: Sequence[str]) -> None:
    """Prints what will be trained, on which data and devices, and what changed since the last start."""
    experiment, devices, processes = setup.experiment, setup.strategy.devices, jax.process_count()
    if is_new:
        adaptation = lora.lora_of(experiment.model)
        optimizer = experiment.optimizer if adaptation is None else lora.for_factors(experiment.optimizer)
        console.print(parameter_table(setup.trained_shapes, optimizer))
        if adaptation is not None:
            n_base = sum(leaf.size for leaf in jax.tree.leaves(setup.initial))
            console.print(f"LoRA      the {n_base:,} parameters of the base stay as they are")
    lacks = models.lacks(setup.model) if experiment.model.input_kind.is_tokens else []
    if lacks:
        console.print(f"this model has no {'; no '.join(lacks)}", soft_wrap=True)
    console.print(f"data      {setup.data.source}")
    among = f" in {processes} processes" if processes > 1 else ""
    console.print(f"devices   {len(devices)} x {devices[0].device_kind}{among}")
    schedule, steps = experiment.optimizer.schedule, experiment.training.steps
    if isinstance(schedule, WarmupScheduleConfig) and schedule.warmup_steps >= steps:
        rises = f"optimizer.schedule.warmup_steps={schedule.warmup_steps} of training.steps={steps}"
        console.print(f"the learning rate only rises, in {rises}", soft_wrap=True)
    for change in changes:
        console.print(f"changed since the last start: {change}", soft_wrap=True)
        decay_steps = getattr(schedule, "decay_steps", 0)
        if change.startswith("training.steps") and decay_steps is None:
            console.print(
                "the learning rate now decays until the new last step (optimizer.schedule.decay_steps)",
                soft_wrap=True,
            )
