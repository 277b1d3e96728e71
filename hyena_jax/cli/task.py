"""`hyena-jax task`: one example of a synthetic task, and what is known about the task."""

import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from hyena_jax.cli.base import Command
from hyena_jax.config import TASK_CONFIGS, TaskConfig
from hyena_jax.config.flags import FLAT, PluginFlags, positional, take_flag
from hyena_jax.config.help import terminal_width
from hyena_jax.config.registry import OWN_NAMES
from hyena_jax.system.errors import UserError, choose, require

if TYPE_CHECKING:
    from hyena_jax.data.tasks import TaskRows
    from hyena_jax.tasks.task import Preset, Row, Task

MAX_PARTS = 12
"""Pairs of lines, of inputs and targets, that are printed of a row."""
UNSCORED = "·"


@dataclass(frozen=True)
class DrawTask(Command):
    """Draw one example of a synthetic task, and print its layout, chance level, metric and settings."""

    name: str = field(metadata=positional("NAME"))
    """One of the tasks above."""
    preset: str = "small"
    """Setting: `small`, or a published one; an example lists them."""
    part: Literal["test", "train"] = "test"
    """Rows to evaluate on, or training rows."""
    index: int = 0
    """Number of the row, from 0."""
    seed: int | None = None
    """Seed of the rows; None takes data.test_seed, or 0 for training rows."""
    plugins: PluginFlags = field(default=PluginFlags(), metadata=FLAT)
    data: TaskConfig | None = None

    @classmethod
    def take(cls, called: str, arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
        """Reads NAME and the preset, whose settings are the defaults of the flags --data.FIELD."""
        from hyena_jax.data.dataset import load

        arguments, values = super().take(called, arguments)
        if arguments and not arguments[0].startswith("-"):
            config_class = choose("task", arguments[0], TASK_CONFIGS, OWN_NAMES)
            preset = take_flag("--preset", list(arguments))
            presets = load(config_class()).task.all_presets(config_class)
            values["data"] = choose("--preset", "small" if preset is None else preset, presets).config
        return arguments, values

    @classmethod
    def notes(cls) -> list[str]:
        more = "`hyena-jax task NAME --help` describes the settings of a task, --data.FIELD."
        return [f"Tasks: {', '.join(TASK_CONFIGS)}", more]

    def run(self, arguments: Sequence[str]) -> int:
        from hyena_jax.data.dataset import load
        from hyena_jax.data.tasks import example_row

        if self.data is None:
            raise UserError(f"NAME must come first after task, got {arguments[1]!r}")
        data, is_test = load(self.data), self.part == "test"
        seed = self.seed if self.seed is not None else data.config.test_seed if is_test else 0
        require(self.index >= 0, "index", self.index, "at least 0")
        require(0 <= seed < 2**32, "seed", seed, "in [0, 2**32)")
        task, presets = data.task, data.task.all_presets(type(self.data))
        row = example_row(task, data.config, self.part, seed, self.index)
        changed = "" if self.data == presets[self.preset].config else " with other settings"
        print(f"{self.name}, preset {self.preset}{changed}, {self.part} row {self.index}, seed {seed}\n")
        print("\n".join(example(task, data.config.for_evaluation() if is_test else data.config, row)))
        print("\n".join(["", *about(data), "", *described(presets)]))
        return 0


def example(task: "Task", config: TaskConfig, row: "Row") -> Iterator[str]:
    """Lines of inputs above targets, as wide as the terminal allows; the middle of a long row is left out."""
    answer = task.answer or task.symbol
    shown = [UNSCORED] * len(row.inputs)
    positions = range(len(row.inputs)) if row.positions is None else row.positions
    weights = [1] * len(row.targets) if row.weights is None else row.weights
    for position, target, weight in zip(positions, row.targets, weights, strict=True):
        if weight > 0:
            shown[position] = answer(config, int(target))
    inputs = [task.symbol(config, int(i)) for i in row.inputs]
    width = max(map(len, inputs + shown))
    in_line = max(1, (terminal_width() - len("inputs  ")) // (width + 1))
    parts = []
    for first in range(0, len(inputs), in_line):
        rows = (("inputs", inputs), ("target", shown))
        cells = ((title, symbols[first : first + in_line]) for title, symbols in rows)
        parts.append([f"{title}  {' '.join(s.rjust(width) for s in some)}" for title, some in cells])
    half, n_left_out = MAX_PARTS // 2, len(parts) - MAX_PARTS
    if n_left_out > 0:
        parts[half:-half] = [[f"... {in_line * n_left_out:,} inputs left out ..."]]
    for i, part in enumerate(parts):
        yield from ["", *part] if i > 0 else part


def about(data: "TaskRows") -> Iterator[str]:
    """Lines about the layout, the chance level, the metric and the settings."""
    chance = inspect.getdoc(data.task.chance)
    yield inspect.getdoc(data.task.draw) or ""
    yield ""
    yield from _item("chance", f"{data.chance:.4g}" + (f": {chance}" if chance else ""))
    yield from _item("metric", ", ".join(data.metric_names).replace("_", " "))
    values = (f"{field.name} {getattr(data.config, field.name)}" for field in fields(data.config))
    yield from _item("settings", ", ".join(values))


def described(presets: Mapping[str, "Preset"]) -> Iterator[str]:
    """Lines with presets, where they come from, and the published numbers; a source is not said twice."""
    said = None
    for name, preset in presets.items():
        usual = type(preset.config)()
        changed = ", ".join(
            f"{option.name} {getattr(preset.config, option.name)}"
            for option in fields(usual)
            if getattr(preset.config, option.name) != getattr(usual, option.name)
        )
        lines = [changed or "the defaults"]
        if (preset.source, preset.published) != said:
            lines += [preset.source, *([f"published: {preset.published}"] if preset.published else [])]
        said = preset.source, preset.published
        yield from _item(f"preset {name}", "\n".join(lines))


def _item(title: str, text: str) -> Iterator[str]:
    indent = " " * 4
    yield title
    for line in text.splitlines():
        yield from textwrap.wrap(line, terminal_width(), initial_indent=indent, subsequent_indent=indent)
