"""What a page shows a model with: a text, a held-out row of tokens, or a held-out image.

Axes: L tokens or patches, V classes.
"""

from itertools import islice
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from hyena_jax.data.dataset import Batch, Dataset, Encoding
from hyena_jax.data.tokenizers import Tokenizer, encode_start, is_tokenizer
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import read_bytes
from hyena_jax.training.loss import cross_entropy

# The largest text file, and the most characters of it that are encoded for each token shown.
MAX_BYTES, MAX_CHARACTERS = 2**26, 64
BOS = "<bos>"


class Example(NamedTuple):
    """One input of a model.

    Attributes:
      inputs: tokens int32 [1, L], or an image [1, height, width, colours].
      labels: the text of each token; empty for an image.
      targets: what the model should say at each position, int32 [1, L], or the label [1] of an image.
      weights: 0 where a target does not count, of the shape of `targets`.
      shift: 1 if target t is token t + 1, as in a text; 0 if it is an answer at position t.
      source: where it comes from, to be printed.
    """

    inputs: np.ndarray
    labels: tuple[str, ...]
    targets: np.ndarray
    weights: np.ndarray
    shift: int
    source: str


class Scores(NamedTuple):
    """How a model predicts each token of an example; NaN and -1 where nothing is predicted.

    Attributes:
      nats: the loss of each token [L].
      guess: the most probable id in its place [L].
      probability: what the model gave the guess [L].
    """

    nats: np.ndarray
    guess: np.ndarray
    probability: np.ndarray


def from_text(tokenizer: Tokenizer, text: str, most: int, path: Path | None = None) -> Example:
    """The first `most` tokens of a text, from a file if `path` is given; `bos` is one of them."""
    name = "text" if path is None else f"path {str(path)!r}"
    try:
        ids = np.asarray(encode_start(tokenizer, text[: MAX_CHARACTERS * most]), np.int32)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    n_starts = int(getattr(tokenizer, "bos", None) is not None)
    require(len(ids) > n_starts, name, text[:40], "at least one token long")
    is_whole, ids = len(ids) <= most and len(text) <= MAX_CHARACTERS * most, ids[:most]
    part = "all" if is_whole else "the first"
    source = f"{part} {len(ids)} tokens of {'the given text' if path is None else path}"
    targets = np.append(ids[1:], 0)
    weights = np.append(np.ones(len(ids) - 1, np.float32), np.float32(0))
    return Example(ids[None], _pieces(tokenizer, ids), targets[None], weights[None], 1, source)


def from_file(tokenizer: Tokenizer, path: Path, most: int) -> Example:
    """The first `most` tokens of a text file in UTF-8."""
    try:
        text = read_bytes("path", path, MAX_BYTES).decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UserError(f"must be a text in UTF-8, got {str(path)!r}: {error}", "path") from error
    return from_text(tokenizer, text, most, path)


def held_out(data: Dataset, encoding: Encoding, index: int, most: int) -> Example:
    """A held-out row of a run's data: the first `most` tokens of a window, or an image."""
    n_rows = data.n_eval_rows()
    require(0 <= index < n_rows, "index", index, f"in 0..{n_rows - 1}, the held-out rows")
    batch = next(islice(data.eval_batches(1), index, None))
    is_image = batch["inputs"].ndim > 2
    source = f"held-out {'image' if is_image else 'row'} {index}; data: {data.source}"
    if is_image:
        return Example(batch["inputs"], (), batch["targets"], batch["weights"], 0, source)
    inputs, targets, weights = batch["inputs"], _everywhere(batch, "targets"), _everywhere(batch, "weights")
    # What a target without weight says does not count: a text's last window ends with padding.
    counts = weights[0] > 0
    inside = counts[:-1]
    is_text = inside.any() and np.array_equal(targets[0, :-1][inside], inputs[0, 1:][inside])
    if is_text:  # the last target that counts is one token further
        most = min(most, np.flatnonzero(counts)[-1] + 2)
    inputs, targets, weights = (x[:, :most] for x in (inputs, targets, weights))
    labels = _pieces(encoding, inputs[0]) if is_tokenizer(encoding) else tuple(f"{i} " for i in inputs[0])
    source = f"{inputs.shape[1]} tokens, {source}"
    return Example(inputs, labels, targets, weights, int(is_text), source)


def _everywhere(batch: Batch, name: str) -> np.ndarray:
    """`targets` or `weights` at every input [1, L]; 0 where the batch's `positions` name none."""
    if "positions" not in batch:
        return batch[name]
    whole = np.zeros(batch["inputs"].shape, batch[name].dtype)
    np.put_along_axis(whole, batch["positions"], batch[name], axis=1)
    return whole


def _pieces(tokenizer: Tokenizer, ids: np.ndarray) -> tuple[str, ...]:
    return tuple(piece(tokenizer, int(i)) for i in ids)


def piece(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; decoding leaves `bos` out, which is to be seen here."""
    return BOS if token == getattr(tokenizer, "bos", None) else tokenizer.decode([token])


def scores(example: Example, logits: np.ndarray) -> Scores:
    """How logits [1, L, V] predict the tokens of an example; token 0 of a text is not predicted."""
    nats = np.asarray(cross_entropy(jnp.asarray(logits), jnp.asarray(example.targets)))[0].astype(np.float64)
    probabilities = np.asarray(probability(logits))[0]
    counts = example.weights[0] > 0
    found = Scores(
        np.where(counts, nats, np.nan),
        np.where(counts, probabilities.argmax(-1), -1),
        np.where(counts, probabilities.max(-1), np.nan),
    )
    if example.shift == 0:
        return found
    return Scores(
        *(np.insert(x[:-1], 0, nothing) for x, nothing in zip(found, (np.nan, -1, np.nan), strict=True))
    )


def probability(logits: np.ndarray) -> np.ndarray:
    """softmax of logits [..., V], float64."""
    wide = np.asarray(logits, np.float64)
    powers = np.exp(wide - wide.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
