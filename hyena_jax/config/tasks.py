"""The base class of the configs of synthetic tasks, and the tasks that are registered."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Self

from hyena_jax.config.checks import AtLeast
from hyena_jax.config.data import DATA_CONFIGS, DataConfig
from hyena_jax.config.models import MAX_POSITIONS, MAX_SYMBOLS
from hyena_jax.system.errors import require


@dataclass(frozen=True)
class TaskConfig(DataConfig):
    """Base class of the configs of synthetic tasks, whose rows are drawn from (seed, index)."""

    batch_size: int = field(default=64, kw_only=True)
    """Rows per step, over all devices and accumulation steps."""
    train_rows: Annotated[int | None, AtLeast(1)] = field(default=None, kw_only=True)
    """Rows of a fixed training set, shuffled every epoch; None draws new rows for every step."""
    test_rows: Annotated[int, AtLeast(1)] = field(default=512, kw_only=True)
    """Rows to evaluate on."""
    test_seed: int = field(default=0, kw_only=True)
    """Seed of the rows to evaluate on; the seed of the experiment draws the training rows."""
    disjoint: bool = field(default=True, kw_only=True)
    """No row is in both parts: a hash of a row's inputs keeps an eighth of all rows for the evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.test_seed < 2**32, "test_seed", self.test_seed, "in [0, 2**32)")
        lengths = ("seq_len", "test_seq_len", "max_len", "test_max_len", "row_len")
        limits = dict.fromkeys(lengths, MAX_POSITIONS) | {"vocab_size": MAX_SYMBOLS}
        for name, most in limits.items():
            value = getattr(self, name, None)
            require(value is None or value <= most, name, value, f"at most {most}")

    @property
    def n_symbols(self) -> int:
        """Number of ids of the inputs and targets."""
        return self.vocab_size

    def for_evaluation(self) -> Self:
        """The settings of the rows to evaluate on: a length `test_...` that is given takes its place."""
        changes = {}
        for name in ("seq_len", "min_len", "max_len"):
            length = getattr(self, f"test_{name}", None)
            changes |= {} if length is None else {name: length, f"test_{name}": None}
        return replace(self, **changes) if changes else self


class _TaskConfigs(Mapping[str, type[TaskConfig]]):
    """The tasks among the registered data: config classes by name."""

    def __getitem__(self, name: str) -> type[TaskConfig]:
        if not issubclass(DATA_CONFIGS[name], TaskConfig):
            raise KeyError(name)
        return DATA_CONFIGS[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, kind in DATA_CONFIGS.items() if issubclass(kind, TaskConfig))

    def __len__(self) -> int:
        return sum(1 for _ in self)


TASK_CONFIGS = _TaskConfigs()
# By name, so that a new task is one new file; the files import this module, and no array library.
for _file in pkgutil.iter_modules([str(Path(__file__).parents[1] / "tasks")]):
    importlib.import_module(f"hyena_jax.tasks.{_file.name}")
