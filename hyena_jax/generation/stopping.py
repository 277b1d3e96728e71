"""Texts that end a continuation, whichever tokens spell them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hyena_jax.generation.programs import Chunk
from hyena_jax.generation.prompts import encode
from hyena_jax.system.errors import require

if TYPE_CHECKING:
    from hyena_jax.data.tokenizers import Tokenizer

PROMPT_TOKENS = 16
"""Tokens of the prompt that a decoder reads first, since a first piece can lose its leading space."""
Watch = Callable[[Sequence[int]], int | None]
"""watch(next tokens of a row) -> how many of them the row keeps if it ends; None if it continues."""


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
    """The ids of texts that are a single token, which the device checks, and the texts that the host checks.

    Raises:
      UserError: if a text is empty or cannot be encoded; or is several ids and the tokenizer is of ids.
    """
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
