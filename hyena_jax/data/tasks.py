"""Synthetic tasks as batches: the `Dataset` of a `TaskConfig`, whose rows are drawn from (seed, index).

Shapes: B batch, L inputs, n scored positions, V symbols.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from hyena_jax.config import TaskConfig
from hyena_jax.config.checks import summary
from hyena_jax.data.dataset import Batch, Dataset
from hyena_jax.system.errors import UserError, choose, require
from hyena_jax.tasks.task import TASKS, Draw, NextTokenTaskConfig, Row, Task, next_tokens

Part = Literal["train", "test"]
PARTS: Mapping[Part, int] = MappingProxyType({"train": 0, "test": 1})
"""What the seed of a row holds between the seed of its part and its index."""
HELD_OUT_OF = 8
"""One in so many rows is kept for the evaluation where the two parts are disjoint."""
MAX_TRIES = 1000
"""Rows drawn for one, until one belongs to the part: 7/8 to this power is 1e-58."""
HASHED_ROWS = 16
"""Rows of each part that enter the fingerprint, in addition to the settings."""

LABELS = {
    "accuracy": "accuracy at scored positions",
    "sequence_accuracy": "fraction of rows without an error",
    "macro_accuracy": "accuracy, mean over classes",
    "scaled_accuracy": "scaled accuracy, 0 at chance",
}


def load_task(config: TaskConfig, encoding: None = None) -> "TaskRows":
    """The rows of a registered task: see `register_task`."""
    return TaskRows(TASKS[type(config)], config)


def draw_row(task: Task, config: TaskConfig, part: Part, seed: int, index: int) -> Row:
    """Row `index` of a part, a pure function of its arguments.

    With `config.disjoint`, rows are drawn until one belongs to the part, as a hash of its inputs decides;
    UserError if the settings allow too few different rows.
    """
    rng = np.random.default_rng((seed, PARTS[part], index))
    is_test = part == "test"
    draw: Draw = task.draw if is_test else task.draw_train or task.draw
    settings = config.for_evaluation() if is_test else config
    for _ in range(MAX_TRIES):
        row = draw(rng, settings)
        _check_row(row, draw)
        # Padding does not count: rows of one text are one row.
        content = np.trim_zeros(row.inputs, "b").astype("<i4").tobytes()
        is_held_out = hashlib.blake2b(content, digest_size=1).digest()[0] % HELD_OUT_OF == 0
        if not config.disjoint or is_held_out == is_test:
            every = not is_test and isinstance(config, NextTokenTaskConfig) and config.predict_all
            return next_tokens(np.append(row.inputs, row.targets[-1])) if every else row
    raise UserError(
        f"must be False with so few different rows, got True: {MAX_TRIES} draws gave no row of the"
        f" {part} part",
        "disjoint",
    )


def example_row(task: Task, config: TaskConfig, part: Part, seed: int, index: int) -> Row:
    """As `draw_row`, checked as a batch is, and drawn twice: it must depend on its arguments alone."""
    row, again = (draw_row(task, config, part, seed, index) for _ in range(2))
    same = all(np.array_equal(a, b) for a, b in zip(row, again, strict=True) if a is not None)
    require(same, "a row that is drawn twice", "another one", "the same: take all random numbers from rng")
    _batch([row], config.n_symbols)
    return row


def _check_row(row: Any, draw: Draw) -> None:
    """UserError unless a task drew a row whose arrays fit together."""
    what = f"what {getattr(draw, '__name__', 'the task')} draws"
    require(isinstance(row, Row), what, type(row).__name__, "a row: return hyena_jax.tasks.task.row(...)")
    shapes = {name: array.shape for name, array in row._asdict().items() if array is not None}
    is_flat = len(row.inputs.shape) == len(row.targets.shape) == 1 and len(row.inputs) > 0
    require(is_flat, what, shapes, "a row of inputs [L] and targets [n]")
    fits = row.positions is not None or len(row.targets) == len(row.inputs)
    fits &= all(shapes.get(name, row.targets.shape) == row.targets.shape for name in ("positions", "weights"))
    require(fits, what, shapes, "a row of as many targets as inputs, or as its positions (and its weights)")


@dataclass(frozen=True, eq=False)
class TaskRows(Dataset):
    """Rows of a task to train on and to evaluate on."""

    task: Task
    config: TaskConfig

    kind, unit = "task", "answer"

    def __post_init__(self) -> None:
        choose("metric", self.task.metric, LABELS)

    @property
    def inputs(self) -> str:
        return self.config.inputs

    @property
    def n_train_rows(self) -> int | None:
        """Rows of a fixed training set; None draws new rows for every step."""
        return self.config.train_rows

    @property
    def n_held_out_rows(self) -> int:
        return self.config.test_rows

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ids of the inputs and targets."""
        return {"vocab_size": self.config.n_symbols}

    def _train_rows_of(self, seed: int) -> Callable[[np.ndarray], Batch]:
        return partial(self._rows, "train", seed)

    def train_rows(self, indices: np.ndarray) -> Batch:
        """`inputs` int32 [B, L], `targets` int32 [B, n], `positions` int32 [B, n] unless n = L positions are
        scored, and `weights` float32 [B, n], 0 where there is no answer, unless all are scored."""
        return self._rows("train", 0, indices)

    def held_out_rows(self, indices: np.ndarray) -> Batch:
        return self._rows("test", self.config.test_seed, indices)

    def _rows(self, part: Part, seed: int, indices: np.ndarray) -> Batch:
        rows = [draw_row(self.task, self.config, part, seed, int(i)) for i in indices]
        return _batch(rows, self.config.n_symbols)

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of the inputs of the longest row of either part: all rows of a part have one shape."""
        return max(self.train_rows(np.zeros(1, np.int64))["inputs"].shape[1:], super().row_shape)

    @property
    def source(self) -> str:
        """The first sentence about the task, to be printed."""
        about = summary(type(self.config)).rstrip(".")
        return "; ".join(filter(None, [about, f"chance {self.chance:.3g}"]))

    @cached_property
    def chance(self) -> float:
        """The task's chance level on the rows to evaluate on."""
        return self.task.chance(self.config.for_evaluation())

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metric of the published numbers, then accuracy and, with several answers a row, whole rows."""
        several = ("sequence_accuracy",) if self._first["targets"].size > 1 else ()
        return tuple(dict.fromkeys((self.task.metric, "accuracy", *several)))

    @property
    def curves(self) -> Mapping[str, str]:
        note = "; training: all tokens" if getattr(self.config, "predict_all", False) else ""
        return {"loss": f"loss (nats per answer{note})", **{name: LABELS[name] for name in self.metric_names}}

    @cached_property
    def tallies(self) -> Mapping[str, Callable]:
        """Rows, rows without an error, answers by position, and answers by class if a metric needs them.

        `correct` is bool, `targets` int and `weights` float32, all [B, n], of NumPy or JAX.
        """

        def is_asked(weights: Any) -> Any:
            return (weights > 0).any(-1)

        def by_class(targets: Any, values: Any) -> Any:
            return ((targets[..., None] == np.arange(self.config.n_symbols)) * values[..., None]).sum(-2)

        found: dict[str, Callable] = {
            "rows": lambda correct, targets, weights: is_asked(weights).astype(np.float32),
            "whole_rows": lambda correct, targets, weights: (
                (correct | (weights == 0)).all(-1) & is_asked(weights)
            ).astype(np.float32),
        }
        if self.task.shows_positions:
            found["correct_at"] = lambda correct, targets, weights: correct * weights
            found["count_at"] = lambda correct, targets, weights: weights
        if self.task.metric == "macro_accuracy":
            found["correct_of"] = lambda correct, targets, weights: by_class(targets, weights * correct)
            found["count_of"] = lambda correct, targets, weights: by_class(targets, weights)
        return found

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the settings and some rows of both parts."""
        settings = [type(self.config).__qualname__, dataclasses.asdict(self.config)]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for part in PARTS:
            for i in range(HASHED_ROWS):
                for array in draw_row(self.task, self.config, part, 0, i):
                    if array is not None:
                        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()

    def loss_metrics(self, loss: float) -> dict[str, float]:
        """Nothing: of a task's answers, accuracy is reported, and no perplexity."""
        return {}

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """The metrics of `metric_names`, in [0, 1]; scaled accuracy is below 0 where chance is better."""
        if "correct" not in sums:
            return {}
        accuracy = sums["correct"] / sums["count"]
        values = {"accuracy": accuracy}
        if self.task.metric == "scaled_accuracy":
            values["scaled_accuracy"] = (accuracy - self.chance) / (1 - self.chance)
        if "rows" in sums:
            values["sequence_accuracy"] = sums["whole_rows"] / sums["rows"]
        if "count_of" in sums:
            asked = sums["count_of"] > 0
            values["macro_accuracy"] = float((sums["correct_of"][asked] / sums["count_of"][asked]).mean())
        return {name: values[name] for name in self.metric_names if name in values}

    def eval_metrics(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """`error_at_{i}`: the fraction of wrong answers at the i-th scored position of a row, from 0."""
        if "count_at" not in sums:
            return {}
        pairs = zip(np.atleast_1d(sums["correct_at"]), np.atleast_1d(sums["count_at"]), strict=True)
        return {f"error_at_{i}": float(1 - correct / n) for i, (correct, n) in enumerate(pairs) if n > 0}


def _batch(rows: Sequence[Row], n_symbols: int) -> Batch:
    """Rows as arrays [B, ...] by name; UserError if they do not fit together or the vocabulary."""
    first, batch = rows[0], {}
    for name in (name for name in Row._fields if getattr(first, name) is not None):
        shapes = {np.shape(getattr(row, name)) for row in rows}
        require(len(shapes) == 1, f"{name} of the task's rows", sorted(shapes), "of one shape")
        batch[name] = np.stack([getattr(row, name) for row in rows])
    for name, below in (("inputs", n_symbols), ("targets", n_symbols), ("positions", len(first.inputs))):
        if name in batch:
            values = batch[name]
            values = values[batch["weights"] != 0] if name == "targets" and "weights" in batch else values
            least, most = int(values.min(initial=0)), int(values.max(initial=0))
            allowed = f"in 0..{below - 1}"
            require(least >= 0 and most < below, f"{name} of the task's rows", f"{least} to {most}", allowed)
    return batch
