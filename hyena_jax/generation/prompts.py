"""The texts of a request as tokens: prompts, checked and batched, and texts that end a continuation.

Axes: P prompts, T tokens of the longest, R rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from hyena_jax.config import ModelConfig
from hyena_jax.data.tokenizers import encode_start
from hyena_jax.generation.programs import Chunk
from hyena_jax.system.errors import UserError, require

if TYPE_CHECKING:
    from hyena_jax.data.tokenizers import Tokenizer

OnFull = Literal["slide", "error"]

PROMPT_TOKENS = 16
"""Tokens of the prompt that a decoder reads first, since a first piece can lose its leading space."""
Watch = Callable[[Sequence[int]], int | None]
"""watch(next tokens of a row) -> how many of them the row keeps if it ends; None if it continues."""


def encode(tokenizer: "Tokenizer", text: str, name: str, at_start: bool = False) -> np.ndarray:
    """The ids of a text, int32 [n], after the tokenizer's `bos` with `at_start`; errors call it `name`."""
    try:
        return encode_start(tokenizer, text) if at_start else tokenizer.encode(text)
    except UserError as error:
        raise UserError(f"{name} {text!r}: {error}") from error


def check_prompts(
    config: ModelConfig, prompts: Sequence[np.ndarray], on_full: OnFull = "slide"
) -> list[np.ndarray]:
    """The prompts, each of one or more valid ids, as int32; with `slide`, only their last max_len tokens."""
    for name in ("max_len", "vocab_size"):
        require(hasattr(config, name), "model", type(config).__name__, f"one whose config has {name}")
    require(len(prompts) >= 1, "prompts", len(prompts), "at least one")
    checked = []
    for prompt in prompts:
        ids = np.asarray(prompt)
        if ids.size == 0:
            raise UserError("must hold at least one token, got an empty one", "prompt")
        is_list = ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer)
        require(is_list, "prompt", f"{ids.dtype} {ids.shape}", "integers [length]")
        wrong = ids[(ids < 0) | (ids >= config.vocab_size)]
        require(wrong.size == 0, "prompt token", wrong[:1].tolist(), f"in 0..{config.vocab_size - 1}")
        most = f"at most max_len={config.max_len}"
        require(on_full == "slide" or len(ids) <= config.max_len, "prompt length", len(ids), most)
        checked.append(ids[-config.max_len :].astype(np.int32))
    return checked


def right_aligned(prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    """Right-aligned tokens int32 [P, T], and lengths int32 [P], or None if all are T."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[len(row) - len(prompt) :] = prompt
    return tokens, None if (lengths == tokens.shape[1]).all() else lengths


@dataclass(frozen=True)
class StopTexts:
    """A row ends after the token that completes the first of these texts."""

    tokenizer: "Tokenizer"
    texts: tuple[str, ...]

    def watch(self, prompt: np.ndarray) -> Watch:
        """A function that reads the tokens of one row, chunk by chunk, after its prompt [n]."""
        decode, longest = self.tokenizer.stream(), max(map(len, self.texts))
        decode(prompt[-PROMPT_TOKENS:].tolist())
        seen = ""

        def end(tokens: Sequence[int]) -> int | None:
            nonlocal seen
            for count, token in enumerate(tokens, start=1):
                seen = seen[-longest:] + decode([token])
                if any(text in seen for text in self.texts):
                    return count
            return None

        return end


def stops(tokenizer: "Tokenizer", texts: Sequence[str]) -> tuple[tuple[int, ...], StopTexts | None]:
    """The ids of texts that are a single token, which the device checks, and the others, for the host."""
    ids = []
    for text in texts:
        require(text != "", "stop", text, "at least one character")
        encoded = encode(tokenizer, text, "stop")
        require(len(encoded) == 1 or tokenizer.kind != "ids", "stop", text, "one token id")
        ids += encoded.tolist() if len(encoded) == 1 else []
    if tokenizer.kind == "dna":  # which decodes to upper case
        texts = [text.upper() for text in texts]
    watched = StopTexts(tokenizer, tuple(texts)) if texts and tokenizer.kind != "ids" else None
    return tuple(ids), watched


def cut(chunk: Chunk, stopped: np.ndarray, watches: Sequence[Watch]) -> tuple[Chunk, np.ndarray]:
    """The chunk cut after the end of each row, and which rows have stopped, bool [R]."""
    is_new, stopped = chunk.is_new.copy(), stopped.copy()
    for i, watch in enumerate(watches):
        kept = watch(chunk.tokens[i][chunk.is_new[i]])
        if kept is not None:
            is_new[i, kept:] = False
            stopped[i] = True
    return chunk._replace(is_new=is_new), stopped
