"""Checking prompts and batching them.

Axes: P prompts, T tokens of the longest.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from hyena_jax.config import ModelConfig
from hyena_jax.data.tokenizers import encode_start
from hyena_jax.system.errors import UserError, require

if TYPE_CHECKING:
    from hyena_jax.data.tokenizers import Tokenizer

OnFull = Literal["slide", "error"]


def encode(tokenizer: "Tokenizer", text: str, name: str) -> np.ndarray:
    """The ids of a text, int32 [n]. Raises UserError, naming `name`, if it cannot be encoded."""
    try:
        return tokenizer.encode(text)
    except UserError as error:
        raise UserError(f"{name} {text!r}: {error}") from error


def encode_prompt(tokenizer: "Tokenizer", text: str) -> np.ndarray:
    """The ids of a prompt, int32 [n], after the tokenizer's `bos`. Raises UserError if there are none."""
    try:
        return encode_start(tokenizer, text)
    except UserError as error:
        raise UserError(f"prompt {text!r}: {error}") from error


def check_prompts(
    config: ModelConfig, prompts: Sequence[np.ndarray], on_full: OnFull = "slide"
) -> list[np.ndarray]:
    """The prompts as int32 arrays; with `slide`, only the last max_len tokens of each.

    Raises:
      UserError: if there are none, or one is empty, too long or not a list of valid token ids; or if the
        model's config has no max_len or no vocab_size.
    """
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
