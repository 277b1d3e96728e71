"""Rows of arrays, of a random-access source, or of an iterator, as a data set.

Shapes: n rows, B batch.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hyena_jax.config.data import input_kind
from hyena_jax.data.dataset import NOTHING, Batch, Dataset, Stream, evenly_spaced
from hyena_jax.data.tokenizers import Tokenizer, as_kept, is_tokenizer
from hyena_jax.system.errors import UserError, require

if TYPE_CHECKING:
    import grain

HASHED_ROWS = 32
"""Rows of a source that enter its fingerprint, in addition to their number."""

CLASSES = "at least 0 where they are integers with a weight (give non-class targets as floats)"
"""What targets must be: a negative class would count from the end, as a negative index does."""

Example = Mapping[str, Any]
"""One row as the user gives it: `inputs`, `targets` and optionally `weights`, without the axis of rows."""
_Form = dict[str, tuple[tuple[int, ...], np.dtype]]
"""The shape, and the dtype that a model reads, of each array of a row, by name."""


def from_rows(
    train: Any,
    held_out: Any = None,
    *,
    inputs: str = "tokens",
    encoding: Any = None,
    sizes: Mapping[str, Any] = NOTHING,
    scores: Mapping[str, Callable] = NOTHING,
    unit: str | None = None,
    source: str = "rows",
) -> "Rows":
    """A data set of rows to train on and to evaluate on, with `inputs`, `targets` and optional `weights`.

    `weights` have the shape of `targets` and are at least 0: means over targets are sum(w x) / sum(w), in
    training over the whole batch. A target of weight 0 may be any number.

    Args:
      train: one of
        arrays by name, {"inputs": [n, ...], "targets": [n, ...]} and optionally "weights";
        a random-access source of `len(train)` rows, where `train[i]` is such a dict without the axis n;
        an endless iterator over such dicts, with `get_state()`, which returns JSON, and `set_state(state)`:
        every process reads all of it, in its own order.
      held_out: arrays or a random-access source; None holds out the last tenth of `train`.
      inputs: the `inputs` of the data's config: integers are read as int32 for `tokens`, as float32 for
        `images`.
      encoding: turns the raw data into `inputs`, and is kept with the run: a tokenizer of
        `hyena_jax.data.tokenizers`, with which `generate` continues prompts; or any JSON value.
      sizes: values for model fields that are None, such as vocab_size; not needed where the arrays or the
        tokenizer determine them.
      scores: metrics of these data by name, score(logits, targets) -> values in the shape of targets.
      unit: what is counted, in the singular; None is `token`, `image` or `row`.
      source: where the rows came from, for people.

    A resumed run recognises its data by a fingerprint. For arrays it is their SHA-256. For a source it covers
    the number of rows, 32 of them, and its attribute `fingerprint` (str) if any; for an iterator only that.

    Raises:
      UserError: if `train`, `held_out` or a row is none of these.
    """
    train = _Arrays(train) if isinstance(train, Mapping) else train
    held_out = _Arrays(held_out) if isinstance(held_out, Mapping) else held_out
    is_random_access = hasattr(train, "__len__") and hasattr(train, "__getitem__")
    if not is_random_access:
        if not all(hasattr(train, name) for name in ("__next__", "get_state", "set_state")):
            raise UserError(
                "must be arrays, a random-access source (__len__ and __getitem__), or an iterator with"
                " get_state() and set_state(state), so that a run resumes exactly; got"
                f" {type(train).__name__}",
                "train",
            )
        require(held_out is not None, "held_out", None, "given with an iterator, which has no last tenth")
    elif held_out is None:
        cut = len(train) * 9 // 10
        require(cut > 0, "train", len(train), "at least 2 rows, to hold one out")
        train, held_out = _Part(train, 0, cut), _Part(train, cut, len(train))
    is_random_access_too = hasattr(held_out, "__len__") and hasattr(held_out, "__getitem__")
    require(is_random_access_too, "held_out", type(held_out).__name__, "arrays or a random-access source")
    for name, part in (("train", train), ("held_out", held_out)):
        if hasattr(part, "__len__"):
            require(len(part) > 0, name, 0, "at least one row")
    form = _form_of(held_out[0], inputs)
    if is_random_access:
        _check_form(_form_of(train[0], inputs), form)
    tokenizer = as_kept(encoding) if is_tokenizer(encoding) else None
    encoding = None if tokenizer is not None else encoding
    known = {} if tokenizer is None else {"vocab_size": tokenizer.vocab_size}
    return Rows(
        train=train,
        held_out=held_out,
        form=form,
        inputs=inputs,
        tokenizer=tokenizer,
        encoding=encoding,
        sizes=_sizes(train, held_out, form, inputs, {**known, **sizes}),
        scores=dict(scores),
        unit=unit or input_kind(inputs).unit,
        source=source,
        fingerprint=_fingerprint(train, held_out, tokenizer, encoding),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows(Dataset):
    """Rows of arrays, of a random-access source, or of an iterator. See `from_rows`."""

    train: Any
    held_out: Any
    form: _Form
    inputs: str
    tokenizer: Tokenizer | None
    encoding: Any
    sizes: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, Callable] = field(default_factory=dict)
    unit: str
    source: str
    fingerprint: str

    @property
    def n_train_rows(self) -> int:
        return len(self.train)

    @property
    def n_held_out_rows(self) -> int:
        return len(self.held_out)

    @property
    def units_per_row(self) -> int:
        return math.prod(self.form["targets"][0])

    def train_batches(
        self, batch_size: int, seed: int, part: int | Sequence[int] = 0, n_parts: int = 1
    ) -> "grain.MapDataset[Batch] | Stream":
        if hasattr(self.train, "__len__"):
            return super().train_batches(batch_size, seed, part, n_parts)
        return Stream(self.train, self._stacked, batch_size, part, n_parts)

    def train_rows(self, indices: np.ndarray) -> Batch:
        return self._rows(self.train, indices)

    def held_out_rows(self, indices: np.ndarray) -> Batch:
        return self._rows(self.held_out, indices)

    def _rows(self, rows: Any, indices: np.ndarray) -> Batch:
        if isinstance(rows, _Part):
            rows, indices = rows.rows, rows.start + indices
        if isinstance(rows, _Arrays):
            return {name: rows.arrays[name][indices].astype(dtype) for name, (_, dtype) in self.form.items()}
        return self._stacked([rows[int(i)] for i in indices])

    def _stacked(self, rows: Sequence[Example]) -> Batch:
        """Rows as a batch; UserError if one is not like the first held-out row."""
        for row in rows:
            _check_form(_form_of(row, self.inputs), self.form)
        batch = {
            name: np.stack([np.asarray(row[name], dtype) for row in rows])
            for name, (_, dtype) in self.form.items()
        }
        size, n_classes = self.sizes.get("vocab_size"), self.sizes.get("n_classes")
        most = int(_of_weight(batch).max(initial=0)) if self.form["targets"][1] == np.int32 else 0
        if n_classes is not None and self.form["targets"] == ((), np.int32):
            require(most < n_classes, "targets of a row", most, f"classes below their number {n_classes}")
        if size is not None and input_kind(self.inputs).is_tokens:
            largest, must = int(batch["inputs"].max()), f"ids below the vocabulary's size {size}"
            require(largest < size, "inputs of a row", largest, must)
            are_ids = self.form["targets"] == self.form["inputs"]
            require(most < size or not are_ids, "targets of a row", most, must)
        return batch


def _check_form(form: _Form, first: _Form) -> None:
    require(form == first, "a row", _shown(form), f"as the first held-out row, {_shown(first)}")


def _shown(form: _Form) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in form.items())


class _Arrays:
    def __init__(self, arrays: Mapping[str, Any]):
        try:
            self.arrays = {name: np.asarray(values) for name, values in arrays.items()}
        except ValueError as error:
            raise UserError(f"arrays must have rows of one shape: {error}") from error
        for name, values in self.arrays.items():
            if values.ndim == 0:
                raise UserError(f"must be an array of rows, got {values.item()!r}", name)
            _require_int32(name, values)
        sizes = {name: len(values) for name, values in self.arrays.items()}
        require(len(set(sizes.values())) == 1, "rows of the arrays", sizes, "equal in number")
        weights = self.arrays.get("weights")
        if weights is not None and weights.size:
            fits = np.isfinite(weights).all() and weights.min() >= 0
            require(bool(fits), "weights", float(weights.min()), "finite and at least 0")

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, i: int) -> Example:
        return {name: values[i] for name, values in self.arrays.items()}


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows `start` to `stop` of a random-access source."""

    rows: Any
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, i: int) -> Example:
        return self.rows[self.start + i]


def _form_of(row: Any, inputs: str) -> _Form:
    """A row's form; UserError if `row` is not a row."""
    names, kind = {"inputs", "targets"}, input_kind(inputs)
    is_row = isinstance(row, Mapping) and names <= set(row) <= names | {"weights"}
    shown = sorted(row) if isinstance(row, Mapping) else type(row).__name__
    require(is_row, "a row", shown, "a dict with inputs, targets and optionally weights")
    form: _Form = {}
    for name, value in row.items():
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise UserError(f"must be an array: {error}", f"{name} of a row") from error
        _require_int32(f"{name} of a row", value)
        is_real = value.dtype.kind in "biuf"
        require(is_real, f"{name} of a row", value.dtype.name, "integers or floating point numbers")
        as_float = name == "weights" or value.dtype.kind == "f" or (name == "inputs" and kind.is_images)
        form[name] = (value.shape, np.dtype(np.float32 if as_float else np.int32))
    if kind.is_tokens:
        ids = np.asarray(row["inputs"])
        require(ids.dtype.kind in "iu", "inputs of a row", ids.dtype.name, "integers, the ids of tokens")
        require(ids.min(initial=0) >= 0, "inputs of a row", int(ids.min(initial=0)), "at least 0")
    if "weights" in row:
        weights = np.asarray(row["weights"])
        is_weight = bool(np.isfinite(weights).all() and (weights >= 0).all())
        require(is_weight, "weights of a row", weights.ravel()[:3].tolist(), "finite and at least 0")
    shape = form.get("weights", form["targets"])[0]
    targets = form["targets"][0]
    require(shape == targets, "weights of a row", shape, f"of the shape {targets} of its targets")
    if form["targets"][1] == np.int32:
        least = int(_of_weight(row).min(initial=0))
        require(least >= 0, "targets of a row", least, CLASSES)
    return form


def _sizes(train: Any, held_out: Any, form: _Form, inputs: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a model, also those that rows determine; UserError if arrays hold wrong ids or classes."""
    (shape, _), kind = form["inputs"], input_kind(inputs)
    is_image = kind.is_images and len(shape) == 3
    sizes = {**({"image_size": shape[:2], "channels": shape[2]} if is_image else {}), **given}
    parts = [part.rows if isinstance(part, _Part) else part for part in (train, held_out)]
    arrays = [part.arrays for part in parts if isinstance(part, _Arrays)]
    if not arrays:
        return sizes
    determined = sizes if len(arrays) == len(parts) else dict(sizes)  # rows to come may hold other ids
    targets = [_of_weight(part) for part in arrays]
    least, most = min(x.min(initial=0) for x in targets), max(x.max(initial=0) for x in targets)
    if form["targets"][1] == np.int32:
        require(least >= 0, "targets", int(least), CLASSES)
    if form["targets"] == ((), np.int32):
        n_classes = determined.setdefault("n_classes", max(2, int(most) + 1))
        require(most < n_classes, "targets", int(most), f"classes below their number {n_classes}")
    if kind.is_tokens:
        read = [part["inputs"] for part in arrays]
        least = min(int(x.min(initial=0)) for x in read)
        require(least >= 0, "inputs", least, "at least 0")
        largest = max(int(x.max(initial=0)) for x in read)
        if form["targets"] == form["inputs"]:
            largest = max(largest, int(most))
        size = determined.setdefault("vocab_size", max(2, largest + 1))
        require(largest < size, "inputs and targets", largest, f"ids below the vocabulary's size {size}")
    return sizes


def _require_int32(name: str, values: np.ndarray) -> None:
    """Refuses integers that a batch, which has int32, would not hold."""
    if values.dtype.kind in "iu" and values.size and not np.can_cast(values.dtype, np.int32):
        least, most, bounds = int(values.min()), int(values.max()), np.iinfo(np.int32)
        wrong = most if most > bounds.max else least
        require(bounds.min <= wrong <= bounds.max, name, wrong, "numbers of 32 bits")


def _of_weight(arrays: Mapping[str, Any]) -> np.ndarray:
    """The targets with a nonzero weight, of a row or of all rows."""
    targets, weights = np.asarray(arrays["targets"]), arrays.get("weights")
    return targets if weights is None else targets[np.asarray(weights) != 0]


def _fingerprint(train: Any, held_out: Any, tokenizer: Tokenizer | None, encoding: Any) -> str:
    kept = {"encoding": encoding} if tokenizer is None else {"tokenizer": tokenizer.to_json()}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for rows in (train, held_out):
        part, rows = (rows, rows.rows) if isinstance(rows, _Part) else (rows, rows)
        digest.update(f"rows {len(part) if hasattr(part, '__len__') else 'endless'}".encode())
        digest.update(str(getattr(rows, "fingerprint", "")).encode())
        if isinstance(rows, _Arrays):
            if part is rows or part.start == 0:
                for name, values in sorted(rows.arrays.items()):
                    digest.update(f"{name} {values.dtype.str} {values.shape}".encode())
                    digest.update(np.ascontiguousarray(values))
        elif hasattr(part, "__len__"):
            for i in evenly_spaced(len(part), HASHED_ROWS):
                for name, value in sorted(part[int(i)].items()):
                    digest.update(f"{name} {np.asarray(value).dtype.str} {np.shape(value)}".encode())
                    digest.update(np.ascontiguousarray(value))
    return digest.hexdigest()
