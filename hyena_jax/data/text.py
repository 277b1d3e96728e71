"""A corpus: the text of a `TextConfig` as tokens."""

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from hyena_jax.config import TextConfig, UserError
from hyena_jax.data.corpora import load_text
from hyena_jax.data.tokenizers import Tokenizer, build_tokenizer


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to learn and tokens to judge by, and what they were made from."""

    tokenizer: Tokenizer
    train: np.ndarray
    """[n], the smallest unsigned dtype that holds vocab_size - 1."""
    held_out: np.ndarray
    """[m], dtype as `train`."""
    held_out_bytes: int
    """UTF-8 bytes of the held-out text, for losses per byte."""
    fingerprint: str
    """SHA-256 of the tokenizer and both token arrays, in hexadecimal."""
    source: str
    """Where the text came from, for people."""


def load_corpus(config: TextConfig, tokenizer: Tokenizer | None = None) -> Corpus:
    """Reads the text of `config` and encodes it with `tokenizer`, or with one built from the whole text.

    Raises UserError if the text cannot be had, has symbols that `tokenizer` lacks, or if either part is
    shorter than `config.seq_len` + 1 tokens.
    """
    text = load_text(config)
    if tokenizer is None:
        tokenizer = build_tokenizer(config, text.train, text.held_out)
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    train = tokenizer.encode(text.train).astype(dtype)
    held_out = tokenizer.encode(text.held_out).astype(dtype)
    for part, tokens in (("training", train), ("held-out", held_out)):
        if len(tokens) <= config.seq_len:
            raise UserError(
                f"the {part} text is too short: {len(tokens)} tokens,"
                f" and seq_len={config.seq_len} needs at least {config.seq_len + 1}"
            )
    return Corpus(
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        held_out_bytes=len(text.held_out.encode()),
        fingerprint=_fingerprint(tokenizer, train, held_out),
        source=text.source,
    )


def _fingerprint(tokenizer: Tokenizer, train: np.ndarray, held_out: np.ndarray) -> str:
    # The length keeps the border between the two parts in the digest.
    header = [tokenizer.to_json(), len(train)]
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for tokens in (train, held_out):
        digest.update(tokens.astype(tokens.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()
