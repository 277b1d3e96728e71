"""Text as tokens: the `Dataset` of a `TextConfig`."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hyena_jax.config import Experiment, TextConfig, UserError, require
from hyena_jax.data import loader
from hyena_jax.data.corpora import load_text
from hyena_jax.data.facts import fill_in
from hyena_jax.data.tokenizers import Tokenizer, build_tokenizer, encode_start

if TYPE_CHECKING:
    import grain

HASHED_AT_ONCE = 2**24
"""Tokens that are read into memory at a time, if they are in a file."""
PROMPT_TOKENS = 32
"""Tokens of the held-out text that a sample continues by default."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on and to evaluate on, with their origin: a `Dataset`."""

    unit: ClassVar[str] = "token"
    curves: ClassVar[Mapping[str, str]] = {"loss": "loss (nats per token)"}
    scores: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    tallies: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    tokenizer: Tokenizer
    train: np.ndarray
    """[n], the smallest unsigned dtype that holds vocab_size - 1."""
    held_out: np.ndarray
    """[m], dtype as `train`."""
    held_out_bytes: int | None
    """UTF-8 bytes of the held-out text, for losses per byte; None if unknown."""
    fingerprint: str
    """SHA-256 of the tokenizer and both token arrays, in hexadecimal."""
    source: str
    """Where the text came from, for people."""
    seq_len: int
    """Tokens L in a row of a batch."""
    kind: str = "text"
    """What the data are, to be printed."""

    @property
    def units_per_row(self) -> int:
        """Tokens in a row."""
        return self.seq_len

    @property
    def n_held_out(self) -> int:
        """Tokens that are predicted: all but the first."""
        return len(self.held_out) - 1

    def to_json(self) -> dict[str, Any]:
        """The fingerprint and tokenizer, for `data.json` of a run."""
        return {"fingerprint": self.fingerprint, "tokenizer": self.tokenizer.to_json()}

    def complete(self, experiment: Experiment) -> Experiment:
        """Fills in vocab_size; refuses one that is too small, and a sample prompt that cannot be encoded."""
        self.prompt(experiment.logging.sample_prompt)
        return fill_in(experiment, {"vocab_size": self.tokenizer.vocab_size})

    def prompt(self, text: str | None) -> np.ndarray:
        """The tokens [P], P >= 1, of logging.sample_prompt; None takes the start of the held-out text."""
        return self.held_out[:PROMPT_TOKENS] if text is None else encode_prompt(self.tokenizer, text)

    def train_batches(
        self, batch_size: int, seed: int, part: int = 0, n_parts: int = 1
    ) -> "grain.MapDataset[loader.Batch]":
        """See `loader.train_batches`."""
        return loader.train_batches(self.train, self.seq_len, batch_size, seed, part, n_parts)

    def n_eval_rows(self, max_rows: int | None = None) -> int:
        """Windows that `eval_batches` covers."""
        return loader.n_eval_batches(len(self.held_out), self.seq_len, 1, max_rows)

    def eval_batches(self, batch_size: int, max_rows: int | None = None) -> Iterator[loader.Batch]:
        """See `loader.eval_batches`."""
        return loader.eval_batches(self.held_out, self.seq_len, batch_size, max_rows)

    def loss_metrics(self, loss: float) -> dict[str, float]:
        """Perplexity, from the loss in nats per token."""
        return {"perplexity": perplexity(loss)}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Perplexity, bits per byte, accuracy, mean probability of the true token, if `nats` are summed."""
        if "nats" not in sums:
            return {}
        values, nats = token_metrics(sums), sums["nats"] / sums["count"]
        if self.held_out_bytes is None:
            return values
        n_tokens = len(self.held_out) - (self.tokenizer.bos is not None)  # those of the text
        bits = nats * n_tokens / self.held_out_bytes / math.log(2)
        return {"perplexity": values["perplexity"], "bits_per_byte": bits, **values}

    def eval_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """None in addition to `metrics`."""
        return {}


def token_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Perplexity, accuracy and mean probability of the true token, from the sums of `make_eval_step`."""
    return {
        "perplexity": perplexity(sums["nats"] / sums["count"]),
        "accuracy": sums["correct"] / sums["count"],
        "probability": sums["probability"] / sums["count"],
    }


def encode_prompt(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The tokens [P], P >= 1, of logging.sample_prompt. Raises UserError if there are none."""
    try:
        ids = encode_start(tokenizer, text)
    except UserError as error:
        raise UserError(f"logging.sample_prompt {text!r}: {error}; None continues held-out data") from error
    require(len(ids) > 0, "logging.sample_prompt", text, "at least one token long")
    return ids


def perplexity(loss: float) -> float:
    """exp(loss), with the loss capped at 700 nats so that it stays finite."""
    return float(np.exp(np.float64(min(loss, 700.0))))


def load_corpus(config: TextConfig, tokenizer: Tokenizer | None = None) -> Corpus:
    """The text of `config`, encoded with `tokenizer`, or with one built from the whole text if None.

    Raises UserError if the text cannot be read, has symbols that `tokenizer` lacks, or if either part is
    shorter than `config.seq_len` + 1 tokens.
    """
    text = load_text(config)
    if tokenizer is None:
        tokenizer = build_tokenizer(config, text.train, text.held_out)
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    train = encode_start(tokenizer, text.train).astype(dtype)
    held_out = encode_start(tokenizer, text.held_out).astype(dtype)
    check_lengths("text", train, held_out, config.seq_len)
    return Corpus(
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        held_out_bytes=len(text.held_out.encode()),
        fingerprint=fingerprint(tokenizer, train, held_out),
        source=text.source,
        seq_len=config.seq_len,
    )


def check_lengths(kind: str, train: np.ndarray, held_out: np.ndarray, seq_len: int) -> None:
    """Raises UserError unless both parts have at least seq_len + 1 tokens, enough for one row."""
    for part, tokens in (("training", train), ("held-out", held_out)):
        if len(tokens) <= seq_len:
            raise UserError(
                f"the {part} {kind} is too short: {len(tokens)} tokens,"
                f" and seq_len={seq_len} needs at least {seq_len + 1}"
            )


def fingerprint(tokenizer: Tokenizer, train: np.ndarray, held_out: np.ndarray) -> str:
    """SHA-256 of a tokenizer and both parts [n], [m], in hexadecimal."""
    # The length puts the border between the two parts into the digest.
    header = [tokenizer.to_json(), len(train)]
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for tokens in (train, held_out):
        for first in range(0, len(tokens), HASHED_AT_ONCE):
            some = tokens[first : first + HASHED_AT_ONCE]
            digest.update(some.astype(some.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def fingerprint_of_no_text(tokenizer: Tokenizer) -> str:
    """The fingerprint that a run has whose weights were converted, and whose text nobody knows."""
    none = np.zeros(0, np.uint8)
    return fingerprint(tokenizer, none, none)
