"""The interface of all data to training and evaluation, and the only place that tells their kinds apart."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from hyena_jax.config import DATA_CONFIGS, DataConfig, Experiment
from hyena_jax.data.images import Normalization
from hyena_jax.data.loader import Batch, Stream
from hyena_jax.data.tokenizers import Tokenizer, tokenizer_from_json

if TYPE_CHECKING:
    import grain

Encoding = Tokenizer | Normalization | Any
"""Converts raw data to a model's inputs; for a user's data, any JSON value. A run keeps the encoding that it
was trained with."""


class Dataset(Protocol):
    """Rows to train on and to evaluate on. A row is one element of a batch: a window of text, an image."""

    kind: str
    """What the data are, to be printed: `text`, `images`."""
    unit: str
    """What is predicted and counted: `token`, `image`."""
    curves: Mapping[str, str]
    """The metrics to plot against the step, with the label of each axis."""
    scores: Mapping[str, Callable]
    """Metrics of only these data, score(logits, targets) -> values, by name: see `MetricConfig`."""
    tallies: Mapping[str, Callable]
    """What evaluation counts in addition, by name, if targets are classes: tally(correct, targets, weights),
    all of the shape of `targets`, returns float32 [B] or [B, m], which is summed over rows for `metrics`."""
    fingerprint: str
    """SHA-256 of all data that a model sees, in hexadecimal."""
    source: str
    """Where the data came from, to be printed."""

    @property
    def units_per_row(self) -> int:
        """Units in a row of a training batch, for the reported speed."""
        ...

    @property
    def n_held_out(self) -> int:
        """Units that a full evaluation scores."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The fingerprint and encoding as JSON values, the content of a run's `data.json`."""
        ...

    def complete(self, experiment: Experiment) -> Experiment:
        """The experiment with sizes filled in from the data; UserError if it contradicts them."""
        ...

    def train_batches(
        self, batch_size: int, seed: int, part: int = 0, n_parts: int = 1
    ) -> "grain.MapDataset[Batch] | Stream":
        """Endless batches of `inputs` [B, ...] and `targets`; element t is a pure function of (seed, t).

        A batch may also hold `weights`, float32 in the shape of `targets`; and `positions` int32 [B, n], the
        inputs at which targets [B, n] are predicted. It holds part number `part` of
        `n_parts` equal parts of the rows. Rows that can only be read in their own order are a `Stream`.
        """
        ...

    def n_eval_rows(self, max_rows: int | None = None) -> int:
        """Number of rows that `eval_batches` yields, without padding."""
        ...

    def eval_batches(self, batch_size: int, max_rows: int | None = None) -> Iterator[Batch]:
        """Batches that cover every held-out unit once, or `max_rows` evenly spaced rows.

        In addition to `inputs` and `targets` they hold `weights`, float32 in the shape of `targets`: 1 or the
        data's own weights, and 0 for padding.
        """
        ...

    def loss_metrics(self, loss: float) -> dict[str, float]:
        """Metrics derived from the mean loss of a training batch in nats per unit, such as perplexity."""
        ...

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics derived from the sums of `make_eval_step` over held-out units, besides the mean loss.

        The sums include `nats`, `correct` and `probability` if targets are classes, and the `tallies`.
        """
        ...

    def eval_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """More metrics, which only `hyena-jax eval` reports, such as the error at each scored position."""
        ...


def load(config: DataConfig, encoding: Encoding | None = None) -> Dataset:
    """The data of `config`, read with `encoding`, or with one built from the data if None."""
    return DATA_CONFIGS.target(type(config))(config, encoding)


def encoding_from_json(values: Mapping[str, Any]) -> Encoding:
    """The encoding in the values of `Dataset.to_json`. Raises UserError or KeyError if there is none."""
    if "normalization" in values:
        return Normalization.from_json(values["normalization"])
    if "encoding" in values:
        return values["encoding"]
    return tokenizer_from_json(values["tokenizer"])
