"""Batches of rows: shuffled for training, each row exactly once for evaluation.

Shapes: B batch, L length (`seq_len`), P processes.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from hyena_jax.config import UserError, require
from hyena_jax.config.checks import MAX_COUNT

if TYPE_CHECKING:
    import grain

Batch = dict[str, np.ndarray]


def shuffled_batches(
    read: Callable[[np.ndarray], Batch],
    n_rows: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> "grain.MapDataset[Batch]":
    """Endless shuffled batches; element t is a pure function of (seed, t).

    Every epoch has each row once, in its own order, and batches may span two epochs. Process p reads rows
    p B/P to (p+1) B/P of the global batch: concatenated over processes, they are a single process's batch.

    Args:
      read: returns the batch of the rows with these indices, int [B/P] in [0, n_rows).
      n_rows: rows of the data.
      batch_size: B, over all processes.
      seed: in [0, 2**32).
      process_index: p.
      process_count: P.

    Raises UserError if P does not divide B.
    """
    import grain

    require(batch_size % process_count == 0, "batch_size", batch_size, f"a multiple of {process_count=}")
    size = batch_size // process_count
    ours = slice(process_index * size, (process_index + 1) * size)
    # Indices, not rows, are shuffled: grain's cost is per element, and one read serves a batch.
    indices = grain.MapDataset.range(n_rows).seed(seed).shuffle().repeat().batch(batch_size)
    return indices.map(lambda batch: read(batch[ours]))


def fresh_batches(
    read: Callable[[np.ndarray], Batch],
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
) -> "grain.MapDataset[Batch]":
    """Batches of rows that are never repeated: element t holds the rows t B to (t + 1) B.

    The arguments are those of `shuffled_batches`; `read` knows every row of any index.

    Raises UserError if P does not divide B.
    """
    import grain

    require(batch_size % process_count == 0, "batch_size", batch_size, f"a multiple of {process_count=}")
    size = batch_size // process_count
    ours = np.arange(process_index * size, (process_index + 1) * size)
    return grain.MapDataset.range(MAX_COUNT).map(lambda t: read(t * batch_size + ours))


def train_batches(
    tokens: np.ndarray,
    seq_len: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> "grain.MapDataset[Batch]":
    """`shuffled_batches` of windows of L + 1 tokens, one at every offset of `tokens`.

    Args:
      tokens: [n], any integer dtype, n > L; kept by reference.
      seq_len: L.
      batch_size: B, over all processes.
      seed: in [0, 2**32).
      process_index: p.
      process_count: P, a divisor of B.

    Returns:
      Data set of `inputs` and `targets`, int32 [B/P, L]; targets are the inputs shifted by one.

    Raises UserError if n <= L or P does not divide B.
    """
    require(len(tokens) > seq_len, "tokens", len(tokens), f"more than seq_len={seq_len}")
    positions = np.arange(seq_len + 1)

    def read(offsets: np.ndarray) -> Batch:
        windows = tokens[offsets[:, None] + positions].astype(np.int32)
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}

    return shuffled_batches(read, len(tokens) - seq_len, batch_size, seed, process_index, process_count)


class DataEnded(UserError):
    """The training data have no more batches."""


class Stream:
    """Batches of an iterator's rows, in its order.

    Nothing is read ahead: `state` is the iterator's state after the last batch taken. Every process reads all
    rows and keeps its own part, so state and batches do not depend on the number of processes.
    """

    def __init__(
        self,
        rows: Any,
        make_batch: Callable[[Sequence[Mapping[str, Any]]], Batch],
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """`rows` is an iterator with `get_state` and `set_state`; `batch_size` counts all processes' rows."""
        require(batch_size % process_count == 0, "batch_size", batch_size, f"a multiple of {process_count=}")
        size = batch_size // process_count
        self._rows, self._make_batch, self._batch_size = rows, make_batch, batch_size
        self._ours = slice(process_index * size, (process_index + 1) * size)
        self._state: str | None = None

    def state(self) -> Any:
        """The iterator's state as JSON values; None before the first batch."""
        return None if self._state is None else json.loads(self._state)

    def restore(self, state: Any) -> None:
        """Continues after the batch at which this state was taken."""
        if state is None:
            raise UserError(
                "the checkpoint holds no state of the iterator: the run began on data of another kind"
            )
        self._rows.set_state(state)
        self._state = json.dumps(state)

    def batch(self, t: int) -> Batch:
        """The next batch, number t. Raises DataEnded if the iterator ends before it is full."""
        rows = list(itertools.islice(self._rows, self._batch_size))
        if len(rows) < self._batch_size:
            raise DataEnded(f"the iterator of the training data ended after {t} batches")
        try:  # kept as text, since the iterator may change the object that it returned
            state = json.dumps(self._rows.get_state())
        except (TypeError, ValueError) as error:
            raise UserError(f"get_state() of the training data must return JSON values: {error}") from error
        batch = self._make_batch(rows[self._ours])
        self._state = state
        return batch


def iterate(dataset: "grain.MapDataset[Batch] | Stream", start: int = 0) -> Iterator[tuple[int, Batch]]:
    """Yields (t, element t) for t = start, start + 1, ...

    A thread reads ahead until the iterator is closed. A `Stream`, at batch `start`, is not read ahead.
    """
    if isinstance(dataset, Stream):
        yield from ((t, dataset.batch(t)) for t in itertools.count(start))
        return
    import grain

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    with closing(iter(dataset[start:].to_iter_dataset(options))) as batches:
        yield from enumerate(batches, start)


def eval_batches(
    tokens: np.ndarray, seq_len: int, batch_size: int, max_windows: int | None = None
) -> Iterator[Batch]:
    """Batches that predict every token after the first exactly once.

    Args:
      tokens: [n], any integer dtype, n >= 2.
      seq_len: L.
      batch_size: B.
      max_windows: take this many evenly spaced windows; None takes all.

    Yields:
      `inputs` and `targets`, int32 [B, L], and `weights`, float32 [B, L]: 1, or 0 where the last window
      or the last batch is padded (with token 0).
    """
    windows = _window_indices(len(tokens), seq_len, max_windows)
    for first in range(0, len(windows), batch_size):
        chosen = windows[first : first + batch_size]
        # A window that starts after the last token is all padding.
        padding = np.full(batch_size - len(chosen), len(tokens))
        starts = np.concatenate([chosen * seq_len, padding])
        positions = starts[:, None] + np.arange(seq_len + 1)
        inside = positions < len(tokens)
        read = np.where(inside, tokens[np.minimum(positions, len(tokens) - 1)], 0).astype(np.int32)
        yield {"inputs": read[:, :-1], "targets": read[:, 1:], "weights": inside[:, 1:].astype(np.float32)}


def n_eval_batches(n_tokens: int, seq_len: int, batch_size: int, max_windows: int | None = None) -> int:
    """Number of batches that `eval_batches` yields for `n_tokens` tokens."""
    return -(-len(_window_indices(n_tokens, seq_len, max_windows)) // batch_size)


def _window_indices(n_tokens: int, seq_len: int, max_windows: int | None) -> np.ndarray:
    return evenly_spaced(-(-(n_tokens - 1) // seq_len), max_windows)


def evenly_spaced(n_rows: int, most: int | None) -> np.ndarray:
    """`most` of the indices 0 .. n_rows - 1, ends included; None takes all. int64, ascending."""
    if most is None or most >= n_rows:
        return np.arange(n_rows)
    return np.linspace(0, n_rows - 1, most).round().astype(np.int64)
