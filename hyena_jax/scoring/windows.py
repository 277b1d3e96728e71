"""The windows in which a model reads long texts, and the batches in which it reads windows.

A sequence is a context that every text shares (a start token, a prefix, or nothing), and then the text. Its
tokens s_0 .. s_{m-1} are read in windows. Window k has the inputs s_{kS} .. s_{kS + M - 1}, at most M =
max_len of them, and predicts the token after each input. A token counts in the first window that predicts it:
the first window scores up to M tokens, and each later one S, the stride. So

    t <= M    s_t is predicted from all tokens before it, s_0 .. s_{t-1};
    t >  M    s_t is predicted from s_{kS} .. s_{t-1}, k = ceil((t - M) / S): M - S + 1 to M tokens.

Tokens of the context are not scored, nor is s_0, which nothing precedes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hyena_jax.parallel.strategy import round_up

LEAST_LENGTH = 32
"""Shortest padded length: padding to fewer tokens saves no time that is worth compiling a program for."""
BATCHES_AT_ONCE = 16
"""Full batches whose windows are sorted by length together; their texts are finished together."""


class Window(NamedTuple):
    """Inputs s[start : start + length] of a sequence, of whose predictions the last `scored` count."""

    text: int
    """Index of the text."""
    start: int
    length: int
    scored: int

    @property
    def targets(self) -> range:
        """Positions in the sequence that count in this window."""
        last = self.start + self.length
        return range(last - self.scored + 1, last + 1)


def windows(text: int, n_context: int, n_tokens: int, max_len: int, stride: int) -> Iterator[Window]:
    """The windows of a text of n_tokens after a context of n_context tokens; none if nothing is scored."""
    end = n_context + n_tokens - 1  # the position of the last token
    reached, start = max(n_context, 1) - 1, 0
    while reached < end:
        last = min(start + max_len, end)
        yield Window(text, start, last - start, last - reached)
        reached, start = last, start + stride


class Batch(NamedTuple):
    """Windows that are read together, as one array [n_rows, length]; missing rows and tokens are padding."""

    windows: tuple[Window, ...]
    n_rows: int
    length: int


@dataclass(frozen=True)
class WindowPlan:
    """How texts are read: by their numbers of tokens alone, so that recomputed batches give the same bits."""

    sizes: tuple[int, ...]
    """Tokens of each text."""
    n_context: int
    """Tokens before each text."""
    max_len: int
    stride: int
    batch_size: int
    """Rows of a batch of max_len tokens; batches of shorter rows have more, of as many tokens in all."""
    row_shards: int
    """The number of rows is a multiple of it."""

    def windows(self, texts: range) -> Iterator[Window]:
        """The windows of some texts."""
        for i in texts:
            yield from windows(i, self.n_context, self.sizes[i], self.max_len, self.stride)

    def n_windows(self, texts: range) -> int:
        """The number of windows of some texts."""
        return sum(1 for _ in self.windows(texts))

    def blocks(self) -> Iterator[range]:
        """Texts one after the other, as many as fill BATCHES_AT_ONCE batches."""
        full = BATCHES_AT_ONCE * self.batch_size * self.max_len
        first, n_tokens = 0, 0
        for i, size in enumerate(self.sizes):
            n_tokens += self.n_context + size
            if n_tokens >= full or i == len(self.sizes) - 1:
                yield range(first, i + 1)
                first, n_tokens = i + 1, 0

    def batches(self, block: range) -> Iterator[Batch]:
        """The windows of a block, the longest first; few shapes, so that few programs are compiled."""
        found = sorted(self.windows(block), key=lambda window: -window.length)
        first = 0
        while first < len(found):
            length = padded(found[first].length, self.max_len)
            n_rows = min(self.batch_size * (self.max_len // length), self._most_rows)
            n_rows = round_up(n_rows, self.row_shards)
            yield Batch(tuple(found[first : first + n_rows]), n_rows, length)
            first += n_rows

    @cached_property
    def _most_rows(self) -> int:
        """All windows, rounded up to a power of two: few texts are not padded to a whole batch."""
        return 1 << max(self.n_windows(range(len(self.sizes))) - 1, 0).bit_length()


def padded(length: int, max_len: int) -> int:
    """The least of max_len, max_len / 2, max_len / 4, ... (rounded up) that is at least `length`."""
    while max_len > LEAST_LENGTH and length <= -(-max_len // 2):
        max_len = -(-max_len // 2)
    return max_len
