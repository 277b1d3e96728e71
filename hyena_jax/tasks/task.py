"""What a task is: a config, a function that draws a row, and what is known about the row.

A file of tasks takes `np` from here.

Shapes: L inputs, n scored positions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hyena_jax.config.registry import register
from hyena_jax.config.tasks import TaskConfig
from hyena_jax.system.errors import require

if TYPE_CHECKING:
    import numpy as np
else:

    class _NumPy:
        """NumPy, imported where a row is drawn: commands read all configs, and `--help` answers at once."""

        def __getattr__(self, name: str) -> Any:
            import numpy

            setattr(self, name, getattr(numpy, name))
            return getattr(numpy, name)

    np = _NumPy()


class Row(NamedTuple):
    """One example of a task; all arrays int32 but the weights."""

    inputs: "np.ndarray"
    """Token ids [L]."""
    targets: "np.ndarray"
    """The answers [n], ids."""
    positions: "np.ndarray | None" = None
    """Where the answers are predicted [n], each in 0..L-1; None if n = L: at every position."""
    weights: "np.ndarray | None" = None
    """float32 [n]: 1, or 0 where there is no answer to score; None scores all. One setting has one n."""


Draw = Callable[["np.random.Generator", Any], Row]
"""draw(rng, config) -> a row; it takes all its random numbers from `rng`."""


class Preset(NamedTuple):
    """A published setting, or the small one that two CPU cores train in minutes."""

    config: TaskConfig
    source: str
    """The paper, and its table or code; the recipe. May be empty for settings without any."""
    published: str = ""
    """Published accuracy in percent, from the source; empty if there are no numbers as text."""


SMALL = "the published task at a size for two CPU cores"


def plain(config: Any, i: int) -> str:
    """The id itself as its symbol."""
    return str(i)


@dataclass(frozen=True)
class Task:
    """A task: its rows, its symbols, its metric and its published settings."""

    draw: Draw
    """Draws a row to evaluate on; its docstring draws the layout."""
    chance: Callable[[Any], float]
    """Accuracy of the best guess that sees the position alone, unless its docstring says otherwise."""
    presets: Mapping[str, Preset] = field(default_factory=dict)
    """By name; without `small`, that is the config's defaults."""
    draw_train: Draw | None = None
    """Draws a training row; None draws as for the evaluation."""
    symbol: Callable[[Any, int], str] = plain
    """(config, id) -> the input with this id as people read it."""
    answer: Callable[[Any, int], str] | None = None
    """The same for targets; None if inputs and targets share their ids."""
    metric: str = "accuracy"
    """The metric of the published numbers: `accuracy`, `sequence_accuracy`, `macro_accuracy` or
    `scaled_accuracy`."""
    shows_positions: bool = True
    """Whether the error at each scored position is reported."""

    def all_presets(self, config_class: type[TaskConfig]) -> dict[str, Preset]:
        """The presets by name, `small` first."""
        return {"small": Preset(config_class(), ""), **self.presets}


TASKS: dict[type[TaskConfig], Task] = {}


def register_task(
    name: str, config_class: type[TaskConfig], draw: Draw, chance: Callable[[Any], float], **options: Any
) -> None:
    """Registers a task for `hyena-jax task NAME`, `hyena-jax train tasks:NAME` and `--data NAME`.

    Args:
      name: lower-case letters, digits and underscores.
      config_class: a frozen dataclass derived from `TaskConfig`.
      draw: draws a row; its docstring draws the layout.
      chance: the accuracy of the best guess, for a config.
      options: the other fields of `Task`.

    Raises:
      UserError: see `hyena_jax.register`.

    >>> from dataclasses import dataclass
    >>> from hyena_jax.tasks import TaskConfig, register_task, row
    >>> @dataclass(frozen=True)
    ... class LastConfig(TaskConfig):
    ...     seq_len: int = 16
    ...     vocab_size: int = 8
    >>> def last(rng, config):
    ...     "The last of some ids."
    ...     ids = rng.integers(config.vocab_size, size=config.seq_len)
    ...     return row(ids, ids[-1:], [config.seq_len - 1])
    >>> register_task("last", LastConfig, last, lambda config: 1 / config.vocab_size)
    """
    for argument, function in (("draw", draw), ("chance", chance)):
        require(callable(function), f"{argument} of task {name!r}", function, "a function")
    register(name, config_class, "hyena_jax.data.tasks:load_task")
    TASKS[config_class] = Task(draw, chance, **options)


@dataclass(frozen=True)
class NextTokenTaskConfig(TaskConfig):
    """Base class of the configs of tasks whose published training predicts every next token.

    Their rows are drawn with the answers alone. The last input has an answer, which is the token behind it.
    """

    predict_all: bool = field(default=True, kw_only=True)
    """Training predicts every next token, as published; False trains on the scored answers alone."""


def evaluated_lengths(config: TaskConfig) -> tuple[int, int]:
    """The least and the largest length to evaluate on: those of `test_...`, or those to train on."""
    low = config.min_len if config.test_min_len is None else config.test_min_len
    high = config.max_len if config.test_max_len is None else config.test_max_len
    require(high >= low, "test_max_len", high, f"at least test_min_len={low}")
    return low, high


def require_even(config: TaskConfig, *names: str) -> None:
    """Refuses odd values of these fields."""
    for name in names:
        value = getattr(config, name)
        require(value % 2 == 0, name, value, "even")


def row(inputs: Any, targets: Any, positions: Any = None, weights: Any = None) -> Row:
    """A row with the dtypes of `Row`. Raises UserError if ids or positions are not integers."""

    def ids(name: str, values: Any) -> "np.ndarray":
        values = np.asarray(values)
        found = values.astype(np.int32)
        require(
            np.array_equal(values, found),
            f"{name} of a task's row",
            np.ravel(values)[:8].tolist(),
            "integers",
        )
        return found

    return Row(
        ids("inputs", inputs),
        ids("targets", targets),
        None if positions is None else ids("positions", positions),
        None if weights is None else np.asarray(weights, np.float32),
    )


def next_tokens(tokens: "np.ndarray") -> Row:
    """Tokens [L + 1] as a row in which every next token is predicted."""
    return row(tokens[:-1], tokens[1:])


def letter(i: int) -> str:
    """a, b, .., z, then a1, b1, ..: a short name for the i-th key."""
    return "abcdefghijklmnopqrstuvwxyz"[i % 26] + (str(i // 26) if i >= 26 else "")
