"""The base class of all data: rows to train on and rows to evaluate on, made into batches.

Shapes: B batch, P parts (processes).
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from hyena_jax.config import DATA_CONFIGS, DataConfig, Experiment
from hyena_jax.config.checks import MAX_COUNT
from hyena_jax.config.data import input_kind
from hyena_jax.data.tokenizers import Tokenizer, encode_start, require_ours, tokenizer_from_json
from hyena_jax.system.errors import UserError, require

if TYPE_CHECKING:
    import grain

Batch = dict[str, np.ndarray]
Encoding = Any
"""Converts raw data to a model's inputs: a `Tokenizer`, a `Normalization`, or, for a user's data, any JSON
value. A run keeps the encoding that it was trained with."""

NOTHING: Mapping[str, Any] = MappingProxyType({})
MAY_BE_MORE = frozenset({"vocab_size", "n_classes"})
"""Sizes of which a model may have more than its data."""
PROMPT_TOKENS = 32
"""Tokens of held-out data that a sample continues by default."""


class Dataset:
    """Rows to train on and rows to evaluate on. A row is one element of a batch: a window of text, an image.

    A subclass writes `train_rows`, `held_out_rows`, their numbers `n_train_rows` and `n_held_out_rows`, and a
    `fingerprint`. Everything else has a default; what the data have, such as a tokenizer, is set by name.
    """

    fingerprint: str
    """Changes with anything that a model sees, so that a run notices other data: a SHA-256 in hexadecimal."""
    n_train_rows: int | None
    """Rows to train on, shuffled every epoch; None if `train_rows` knows a row for every index, which is then
    read once."""
    n_held_out_rows: int
    """Rows to evaluate on."""
    inputs: str = "tokens"
    """What a model reads, as the data's config says."""
    tokenizer: Tokenizer | None = None
    """Turns tokens into text; it is kept with the run, and `generate` continues prompts with it."""
    encoding: Any = None
    """Any other JSON value that is kept with the run and given to `load` when it is opened again."""
    sizes: Mapping[str, Any] = NOTHING
    """Values for fields of the model's config that are None, such as `n_classes`; a tokenizer gives
    `vocab_size`."""
    scores: Mapping[str, Callable] = NOTHING
    """Metrics of only these data, score(logits, targets) -> values, by name: see `MetricConfig`."""
    tallies: Mapping[str, Callable] = NOTHING
    """What evaluation counts in addition, by name, if targets are classes: tally(correct, targets, weights),
    all of the shape of `targets`, returns float32 [B] or [B, m], which is summed over rows for `metrics`."""
    kind: str = "rows"
    """What the data are, to be printed: `text`, `images`."""
    unit: str = "token"
    """What is predicted and counted, in the singular: `token`, `image`."""
    n_readers: int = 1
    """Batches to train on that are read at the same time, ahead of the steps: more where reads take long."""
    source: str = "own data"
    """Where the data came from, to be printed."""

    def train_rows(self, indices: np.ndarray) -> Batch:
        """The rows to train on with these indices, int [B].

        Returns:
          `inputs` [B, ...] and `targets` [B, ...], int32 or float32; and optionally `weights`, float32 in the
          shape of `targets`, `positions`, int32 [B, n], the inputs at which targets [B, n] are predicted, and
          `segment_ids`, int32 in the shape of `inputs`: each run of equal ids is a document.
        """
        raise NotImplementedError

    def held_out_rows(self, indices: np.ndarray) -> Batch:
        """The rows to evaluate on with these indices, int [B], in the form of `train_rows`."""
        raise NotImplementedError

    def train_batches(
        self, batch_size: int, seed: int, part: int | Sequence[int] = 0, n_parts: int = 1
    ) -> "grain.MapDataset[Batch] | Stream":
        """Endless batches to train on; element t is a pure function of (seed, t).

        Every epoch has each row once, in its own order, and batches may span two epochs. Part p holds rows
        p B/P to (p + 1) B/P of the global batch: the parts together are the batch of a single process. Data
        that can only be read in their own order return a `Stream` instead.

        Args:
          batch_size: B, over all parts; a multiple of P.
          seed: in [0, 2**32).
          part: p, or several of them, whose rows follow one another.
          n_parts: P.
        """
        import grain

        ours, read = rows_of(part, n_parts, batch_size), self._train_rows_of(seed)
        if self.n_train_rows is None:
            return grain.MapDataset.range(MAX_COUNT).map(lambda t: read(t * batch_size + ours))
        # Indices, not rows, are shuffled: grain's cost is per element, and one read serves a batch.
        indices = grain.MapDataset.range(self.n_train_rows).seed(seed).shuffle().repeat().batch(batch_size)
        return indices.map(lambda batch: read(batch[ours]))

    def _train_rows_of(self, seed: int) -> Callable[[np.ndarray], Batch]:
        """`train_rows`, where drawn rows may depend on the run's seed."""
        return self.train_rows

    def n_eval_rows(self, max_rows: int | None = None) -> int:
        """Number of rows that `eval_batches` yields, without padding."""
        return len(evenly_spaced(self.n_held_out_rows, max_rows))

    def eval_batches(self, batch_size: int, max_rows: int | None = None) -> Iterator[Batch]:
        """Batches of all rows to evaluate on, in order and each once, or of `max_rows` evenly spaced ones.

        They hold `weights`, float32 in the shape of `targets`: the rows' own, or 1; and 0 for the zeros with
        which the last batch is padded.
        """
        rows = evenly_spaced(self.n_held_out_rows, max_rows)
        for first in range(0, len(rows), batch_size):
            batch = self.held_out_rows(rows[first : first + batch_size])
            weights = batch.get("weights", np.ones(batch["targets"].shape))
            batch = {**batch, "weights": weights.astype(np.float32)}
            missing = batch_size - len(weights)
            yield {name: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for name, x in batch.items()}

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of the inputs of the longest row."""
        return self._first["inputs"].shape[1:]

    @property
    def units_per_row(self) -> int:
        """Targets in a row of a training batch, for the reported speed."""
        return self.train_rows(np.zeros(1, np.int64))["targets"].size

    @property
    def n_held_out(self) -> int:
        """Targets that a full evaluation scores: those with a weight above 0."""
        return sum(int(np.count_nonzero(batch["weights"])) for batch in self.eval_batches(64))

    @cached_property
    def _first(self) -> Batch:
        return next(self.eval_batches(1, 1))

    def complete(self, experiment: Experiment) -> Experiment:
        """The experiment with sizes of the model that are None filled in from the data.

        Raises:
          UserError: if the model contradicts the data, or the data cannot encode the sample prompt.
        """
        kept, model = experiment.data.inputs, experiment.model
        must = f"{self.inputs!r}, as its load says"
        require(kept == self.inputs, f"inputs of {type(experiment.data).__name__}", kept, must)
        reads_ids = self._first["inputs"].dtype.kind in "iu" and not input_kind(self.inputs).is_images
        if reads_ids and hasattr(model, "max_len"):
            must, shape = f"at most model.max_len={model.max_len} tokens (or raise that)", self.row_shape
            require(len(shape) == 1 and shape[0] <= model.max_len, "inputs of a row", shape, must)
        sizes, logging = self.sizes, experiment.logging
        prompt = logging.sample_prompt if logging.sample_tokens > 0 else None
        if self.tokenizer is not None:
            self.prompt(prompt)
            sizes = {"vocab_size": self.tokenizer.vocab_size, **sizes}
        else:
            must = "None with data without a tokenizer (or logging.sample_tokens 0)"
            require(prompt is None, "logging.sample_prompt", prompt, must)
        return fill_in(experiment, sizes)

    def prompt(self, text: str | None) -> np.ndarray:
        """The tokens [n], n >= 1, of logging.sample_prompt; None starts as the first held-out row does."""
        if text is None:
            return self._first["inputs"][0, :PROMPT_TOKENS]
        try:
            ids = encode_start(self.tokenizer, text)
        except UserError as error:
            what = f"logging.sample_prompt {text!r}: {error}; None continues held-out data"
            raise UserError(what) from error
        require(len(ids) > 0, "logging.sample_prompt", text, "at least one token long")
        return ids

    def to_json(self) -> dict[str, Any]:
        """The fingerprint and the tokenizer or encoding as JSON values: a run's `data.json`."""
        if self.tokenizer is not None:
            return {"fingerprint": self.fingerprint, "tokenizer": self.tokenizer.to_json()}
        return {"fingerprint": self.fingerprint, "encoding": self.encoding}

    @property
    def curves(self) -> Mapping[str, str]:
        """The metrics to plot against the step, with the label of each axis."""
        return {"loss": f"loss (nats per {self.unit})"}

    def loss_metrics(self, loss: float) -> dict[str, float]:
        """Metrics of the mean loss of a training batch in nats per unit: perplexity, if inputs are tokens."""
        return {"perplexity": perplexity(loss)} if input_kind(self.inputs).is_tokens else {}

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Metrics from the sums of `make_eval_step` over held-out units, in addition to the mean loss.

        The sums include `nats`, `correct` and `probability` if targets are classes, and the `tallies`. By
        default accuracy; if inputs are tokens, also perplexity and the mean probability of the true token.
        """
        if "nats" not in sums:
            return {}
        accuracy = sums["correct"] / sums["count"]
        if not input_kind(self.inputs).is_tokens:
            return {"accuracy": accuracy}
        return {
            "perplexity": perplexity(sums["nats"] / sums["count"]),
            "accuracy": accuracy,
            "probability": sums["probability"] / sums["count"],
        }

    def eval_metrics(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """More metrics, which only `hyena-jax eval` reports, such as the error at each scored position."""
        return {}


@dataclasses.dataclass(frozen=True)
class Normalization:
    """(x / 255 - mean) / std of a pixel x: one mean and one std for all positions and colours."""

    mean: float
    std: float

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Images uint8 of any shape, normalised to float32."""
        return self._values[images]

    @cached_property
    def _values(self) -> np.ndarray:
        return ((np.arange(256) / 255 - self.mean) / self.std).astype(np.float32)

    def to_json(self) -> dict[str, float]:
        return {"mean": self.mean, "std": self.std}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Normalization":
        """The inverse of `to_json`; UserError for other values."""
        try:
            mean, std = float(values["mean"]), float(values["std"])
            fits = np.isfinite(mean) and 0 < std < np.inf
            require(fits, "mean and std", (mean, std), "finite, std above 0")
            return cls(mean, std)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"must be what to_json returns, got {str(values)[:80]}: {error!r}", "normalization"
            ) from error


def load(config: DataConfig, encoding: Encoding | None = None) -> Dataset:
    """The data of `config`, read with `encoding`, or with one built from the data if None.

    Raises UserError if the function that a user registered returns something else.
    """
    data = DATA_CONFIGS.target(type(config))(config, encoding)
    kind, what = type(data), f"what {type(config).__name__} loads"
    require(isinstance(data, Dataset), what, kind.__name__, "a hyena_jax.data.dataset.Dataset")
    needed = ["fingerprint"]
    for batches, rows in (("train_batches", "train_rows"), ("eval_batches", "held_out_rows")):
        if getattr(kind, batches) is getattr(Dataset, batches):
            needed += [rows, f"n_{rows}"]
    missing = [
        name
        for name in needed
        if name not in dir(data) or vars(Dataset).get(name, 0) is getattr(kind, name, 1)
    ]
    found = f"{kind.__name__} without {', '.join(missing)}"
    require(not missing, what, found, f"a Dataset with {', '.join(needed)}")
    if data.tokenizer is not None:
        require_ours(data.tokenizer)
    elif data.encoding is not None and not type(data.encoding).__module__.startswith("hyena_jax."):
        try:  # a user's own: a run must be able to open it again
            encoding_from_json(json.loads(json.dumps(data.to_json())))
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            found = f"{type(data.encoding).__name__}: {error}"
            raise UserError(f"{what} must have JSON values as the encoding, got {found}") from error
    return data


def encoding_from_json(values: Mapping[str, Any]) -> Encoding:
    """The encoding in the values of `Dataset.to_json`; UserError or KeyError if there is none."""
    if "normalization" in values:
        return Normalization.from_json(values["normalization"])
    if "encoding" in values:
        return values["encoding"]
    return tokenizer_from_json(values["tokenizer"])


def fill_in(experiment: Experiment, sizes: Mapping[str, Any]) -> Experiment:
    """The experiment with each model field that is None filled in from the size of the same name.

    Sizes without a field in the model are ignored; UserError if the model contradicts a size.
    """
    model, found = experiment.model, {}
    names = {field.name for field in dataclasses.fields(model)}
    for name, value in sizes.items():
        if name not in names:
            continue
        ours = getattr(model, name)
        if ours is None:
            found[name] = value
        elif name in MAY_BE_MORE:
            require(ours >= value, f"model.{name}", ours, f"at least the data's {value}")
        else:
            require(ours == value, f"model.{name}", ours, f"the data's {value}")
    return dataclasses.replace(experiment, model=dataclasses.replace(model, **found)) if found else experiment


def with_bits_per_byte(
    values: dict[str, float], sums: Mapping[str, Any], n_tokens: int, n_bytes: int | None
) -> dict[str, float]:
    """The metrics of held-out text, with bits per byte if its bytes are known, and the loss is in nats."""
    if not values or not n_bytes:
        return values
    bits = sums["nats"] / sums["count"] * n_tokens / n_bytes / math.log(2)
    return {"perplexity": values["perplexity"], "bits_per_byte": bits, **values}


def perplexity(loss: float) -> float:
    """exp(loss), with the loss capped at 700 nats so that it stays finite."""
    return float(np.exp(np.float64(min(loss, 700.0))))


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
        part: int | Sequence[int] = 0,
        n_parts: int = 1,
    ):
        """`rows` is an iterator with `get_state` and `set_state`; `batch_size` counts all parts' rows."""
        self._rows, self._make_batch, self._batch_size = rows, make_batch, batch_size
        self._ours = rows_of(part, n_parts, batch_size)
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
        batch = self._make_batch([rows[i] for i in self._ours])
        self._state = state
        return batch


def batches(data: Dataset, batch_size: int, seed: int = 0, start: int = 0) -> Iterator[tuple[int, Batch]]:
    """Yields (t, batch t) to train on, endlessly, for t = start, start + 1, ...

    Batch t depends on `seed` and t alone: to continue after t steps, start at t. Arrays are `inputs` [B, ...]
    and `targets` [B, ...], B = `batch_size`: see `Dataset.train_batches` and `Dataset.train_rows`.

    Raises:
      UserError: if `start` is not 0 with data that can only be read in their own order.
    """
    require(batch_size >= 1, "batch_size", batch_size, "at least 1")
    require(0 <= seed < 2**32, "seed", seed, "in [0, 2**32)")
    require(start >= 0, "start", start, "at least 0")
    found = data.train_batches(batch_size, seed)
    must = "0 with data that are read in their own order (restore the `Stream` of train_batches instead)"
    require(start == 0 or not isinstance(found, Stream), "start", start, must)
    return iterate(found, start, data.n_readers)


def iterate(
    batches: "grain.MapDataset[Batch] | Stream", start: int = 0, n_readers: int = 1
) -> Iterator[tuple[int, Batch]]:
    """Yields (t, element t) for t = start, start + 1, ...

    Threads read ahead until the iterator is closed. A `Stream`, at batch `start`, is not read ahead.
    """
    if isinstance(batches, Stream):
        yield from ((t, batches.batch(t)) for t in itertools.count(start))
        return
    import grain

    options = grain.ReadOptions(num_threads=n_readers, prefetch_buffer_size=max(4, n_readers))
    with closing(iter(batches[start:].to_iter_dataset(options))) as found:
        yield from enumerate(found, start)


def rows_of(part: int | Sequence[int], n_parts: int, batch_size: int) -> np.ndarray:
    """The rows of a batch that belong to a part, or to several parts one after the other."""
    require(batch_size % n_parts == 0, "batch_size", batch_size, f"a multiple of process_count={n_parts}")
    return np.arange(batch_size).reshape(n_parts, -1)[np.atleast_1d(part)].ravel()


def evenly_spaced(n_rows: int, most: int | None) -> np.ndarray:
    """`most` of the indices 0 .. n_rows - 1, ends included; None takes all. int64, ascending."""
    if most is None or most >= n_rows:
        return np.arange(n_rows)
    return np.linspace(0, n_rows - 1, most).round().astype(np.int64)
