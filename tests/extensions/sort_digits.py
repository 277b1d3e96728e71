"""A synthetic task: a row of digits, then the same digits in ascending order."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from hyena_jax.config import Between
from hyena_jax.tasks import Preset, TaskConfig, register_task, row


@dataclass(frozen=True)
class SortDigitsConfig(TaskConfig):
    """Sorting: name the digits of a row in ascending order."""

    n_digits: Annotated[int, Between(2, 10)] = 10
    """Digits, the ids 0..n-1; the id n asks for the next one."""
    seq_len: int = 8
    """Digits in a row."""

    @property
    def n_symbols(self) -> int:
        """The digits and the question mark."""
        return self.n_digits + 1


def draw(rng: np.random.Generator, config: SortDigitsConfig):
    """Digits, and as many question marks, at which they are named in ascending order.

    inputs   3 1 2 ? ? ?
    target   · · · 1 2 3
    """
    digits = rng.integers(config.n_digits, size=config.seq_len)
    inputs = np.append(digits, np.full(config.seq_len, config.n_digits))
    return row(inputs, np.sort(digits), config.seq_len + np.arange(config.seq_len))


def chance(config: SortDigitsConfig) -> float:
    """Any digit at random, as if the smallest were not likelier at the first place."""
    return 1 / config.n_digits


def symbol(config: SortDigitsConfig, i: int) -> str:
    """The digit, or a question mark."""
    return "?" if i == config.n_digits else str(i)


LONG = Preset(SortDigitsConfig(seq_len=32), "this file")
register_task("sort_digits", SortDigitsConfig, draw, chance, presets={"long": LONG}, symbol=symbol)
