"""A data set by hand, with a tokenizer: one number a row in digits and in words, as `21 twenty one`."""

from dataclasses import dataclass

import numpy as np

from hyena_jax.config import DataConfig, register
from hyena_jax.data.dataset import Dataset
from hyena_jax.data.tokenizers import CharactersTokenizer

ONES = "zero one two three four five six seven eight nine".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


@dataclass(frozen=True)
class SpelledNumbersConfig(DataConfig):
    """The numbers from 20 to 99; every eighth is held out."""

    row_len: int = 16
    """Characters of a row, with spaces behind."""


class SpelledNumbers(Dataset):
    """Rows of characters; each target is the next character."""

    kind, unit, source = "numbers", "character", "the numbers from 20 to 99"
    fingerprint = "spelled numbers, version 1"

    def __init__(self, config: SpelledNumbersConfig, tokenizer: CharactersTokenizer):
        self.row_len, self.tokenizer = config.row_len, tokenizer
        self.held_out = np.arange(20, 100, 8)
        self.train = np.setdiff1d(np.arange(20, 100), self.held_out)
        self.n_train_rows, self.n_held_out_rows = len(self.train), len(self.held_out)

    def train_rows(self, indices):
        return self.rows(self.train[indices])

    def held_out_rows(self, indices):
        return self.rows(self.held_out[indices])

    def rows(self, numbers):
        texts = [f"{n} {TENS[n // 10 - 2]} {ONES[n % 10]}".ljust(self.row_len + 1) for n in numbers]
        ids = np.stack([self.tokenizer.encode(text)[: self.row_len + 1] for text in texts])
        return {"inputs": ids[:, :-1], "targets": ids[:, 1:]}


def load(config, encoding):
    """The data set; `encoding` is the run's tokenizer when it is opened again."""
    letters = sorted({*" 0123456789", *"".join(ONES + TENS)})
    return SpelledNumbers(config, encoding or CharactersTokenizer("".join(letters)))


register("spelled_numbers", SpelledNumbersConfig, load)
