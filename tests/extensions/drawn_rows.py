"""Rows from an endless iterator, each with its own weights: harder rows count more."""

from dataclasses import dataclass

import numpy as np

from hyena_jax.config import DataConfig, register
from hyena_jax.data import own
from hyena_jax.data.tokenizers import IdsTokenizer


@dataclass(frozen=True)
class DrawnRowsConfig(DataConfig):
    """Counting modulo 7 from a random start in random steps."""

    seq_len: int = 16
    """Tokens of a row."""


class Drawn:
    """An iterator over random rows; its state is the generator's state."""

    def __init__(self, seq_len: int, seed: int):
        self.seq_len = seq_len
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        return self

    def __next__(self):
        start, step = self.rng.integers(7), self.rng.integers(1, 7)
        row = (start + step * np.arange(self.seq_len + 1)) % 7
        weights = np.full(self.seq_len, 0.0 if start == 0 else step, np.float32)
        return {"inputs": row[:-1], "targets": row[1:], "weights": weights}

    def get_state(self):
        return self.rng.bit_generator.state

    def set_state(self, state):
        self.rng.bit_generator.state = state


def load(config, encoding):
    """A data set with the same rows every time."""
    held_out = Drawn(config.seq_len, seed=1)
    return own.from_rows(
        Drawn(config.seq_len, seed=0), [next(held_out) for _ in range(8)], encoding=IdsTokenizer(7)
    )


register("drawn_rows", DrawnRowsConfig, load)
