"""Text as rows of bytes with a masked loss: only the first letter of each word is predicted."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyena_jax.config import DataConfig, register
from hyena_jax.data import own
from hyena_jax.data.tokenizers import BytesTokenizer


@dataclass(frozen=True)
class WordStartsConfig(DataConfig):
    """Rows of a text file; the last tenth is held out."""

    path: str = "text.txt"
    """The file."""
    seq_len: int = 64
    """Bytes of a row."""


def load(config, encoding):
    """Rows [n, L] of bytes; targets are shifted by one byte, with weight 1 after a space, else 0."""
    text = np.frombuffer(Path(config.path).read_bytes(), np.uint8)
    n_rows = (len(text) - 1) // config.seq_len
    inputs, targets = (text[i : i + n_rows * config.seq_len].reshape(n_rows, -1) for i in (0, 1))
    rows = {"inputs": inputs, "targets": targets, "weights": inputs == ord(" ")}
    return own.from_rows(rows, encoding=BytesTokenizer(), source=config.path)


register("word_starts", WordStartsConfig, load)
