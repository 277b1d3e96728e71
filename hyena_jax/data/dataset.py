"""What training and evaluation know of data, whatever its kind, and the one place that tells kinds apart."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from hyena_jax.config import DATA_CONFIGS, DataConfig, Experiment
from hyena_jax.data.images import Normalization
from hyena_jax.data.loader import Batch, Stream
from hyena_jax.data.tokenizers import Tokenizer, tokenizer_from_json

if TYPE_CHECKING:
    import grain

Encoding = Tokenizer | Normalization | Any
"""What turns raw data into what a model reads; data of a user's may have any JSON value. A run keeps the one
that it was trained with."""


class Dataset(Protocol):
    """Rows to learn and rows to judge by. A row is one element of a batch: a window of text, an image."""

    kind: str
    """What it holds, for people: `text`, `images`."""
    unit: str
    """What is predicted and counted: `token`, `image`."""
    curves: Mapping[str, str]
    """The metrics that are drawn against the step, and what their axes say."""
    scores: Mapping[str, Callable]
    """Metrics of these data alone, score(logits, targets) -> values, by name: see `MetricConfig`."""
    fingerprint: str
    """SHA-256 of everything that a model sees of the data, in hexadecimal."""
    source: str
    """Where it came from, for people."""

    @property
    def units_per_row(self) -> int:
        """Units in a row of a training batch, for the speed that is reported."""
        ...

    @property
    def n_held_out(self) -> int:
        """Units that a whole evaluation judges."""
        ...

    def to_json(self) -> dict[str, Any]:
        """`fingerprint` and encoding as JSON values: what `data.json` of a run holds."""
        ...

    def complete(self, experiment: Experiment) -> Experiment:
        """Fills in what the model takes from the data; UserError where the experiment contradicts it."""
        ...

    def train_batches(
        self, batch_size: int, seed: int, part: int = 0, n_parts: int = 1
    ) -> "grain.MapDataset[Batch] | Stream":
        """Endless batches of `inputs` [B, ...] and `targets`; element t is a pure function of (seed, t).

        They may hold `weights`, float32 of the shape of `targets`. Of `n_parts` equal parts of every batch's
        rows, they hold number `part`. Rows that can only be read in their own order are a `Stream`.
        """
        ...

    def n_eval_rows(self, max_rows: int | None = None) -> int:
        """How many rows `eval_batches` yields, without padding."""
        ...

    def eval_batches(self, batch_size: int, max_rows: int | None = None) -> Iterator[Batch]:
        """Batches that judge every held-out unit once, or `max_rows` evenly spaced rows.

        In addition to `inputs` and `targets` they hold `weights`, float32 of the shape of `targets`: 1 or the
        data's own, and 0 where a batch is padded.
        """
        ...

    def loss_metrics(self, loss: float) -> dict[str, float]:
        """What the mean loss of a training batch, nats a unit, says by other names."""
        ...

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """What the sums of `make_eval_step` over held-out units say, in addition to the mean loss.

        `nats`, `correct` and `probability` are among the sums where targets are classes.
        """
        ...


def load(config: DataConfig, encoding: Encoding | None = None) -> Dataset:
    """The data of `config`, read with `encoding`, or with one made from the data itself."""
    return DATA_CONFIGS.target(type(config))(config, encoding)


def encoding_from_json(values: Mapping[str, Any]) -> Encoding:
    """The encoding in what `Dataset.to_json` returned. Raises UserError or KeyError where there is none."""
    if "normalization" in values:
        return Normalization.from_json(values["normalization"])
    if "encoding" in values:
        return values["encoding"]
    return tokenizer_from_json(values["tokenizer"])
