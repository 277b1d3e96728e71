"""A user's own data as arrays, rows and iterators: batches, sizes, fingerprints and errors."""

import dataclasses
import itertools
from contextlib import nullcontext

import numpy as np
import pytest
from own_rows import ARRAYS, RNG, WEIGHTS, WINDOWS, Source, assert_same, joined

from hyena_jax import data
from hyena_jax.config import DataConfig, Experiment, ImageClassifierConfig, LanguageModelConfig, LoggingConfig
from hyena_jax.data import own
from hyena_jax.data.dataset import DataEnded, encoding_from_json, iterate
from hyena_jax.data.images import ImageSet
from hyena_jax.data.tokenizers import CharactersTokenizer, IdsTokenizer
from hyena_jax.system.errors import UserError


class Endless:
    """An iterator over rows i, i + 3, ..., with state i."""

    def __init__(self, stop=None):
        self.i, self.stop = 0, stop

    def __iter__(self):
        return self

    def __next__(self):
        if self.i == self.stop:
            raise StopIteration
        self.i += 1
        return {name: values[3 * self.i % 20] for name, values in ARRAYS.items()}

    def get_state(self):
        return {"i": self.i}

    def set_state(self, state):
        self.i = state["i"]


def test_arrays_and_their_rows_one_by_one_are_the_same_batches():
    arrays, rows = own.from_rows(ARRAYS, ARRAYS), own.from_rows(Source(), Source())
    for t in (0, 3, 50):
        one = arrays.train_batches(4, seed=1)[t]
        assert_same(one, rows.train_batches(4, seed=1)[t])
    assert {name: (x.dtype, x.shape) for name, x in one.items()} == {
        "inputs": (np.int32, (4, 5)), "targets": (np.int32, (4, 5)), "weights": (np.float32, (4, 5))
    }  # fmt: skip
    for every in (arrays.train_rows(np.arange(20)), arrays.held_out_rows(np.arange(20))):
        for name, values in ARRAYS.items():
            np.testing.assert_array_equal(every[name], values)
    assert_same(every, rows.held_out_rows(np.arange(20)))
    tenth = own.from_rows(ARRAYS)
    assert (tenth.n_train_rows, tenth.n_held_out_rows) == (18, 2)
    assert_same(tenth.held_out_rows(np.arange(2)), arrays.held_out_rows(np.arange(18, 20)))


def test_an_iterator_continues_where_its_state_says():
    data = own.from_rows(Endless(), ARRAYS)
    whole = [batch for _, batch in itertools.islice(iterate(data.train_batches(4, 0), 0), 6)]
    stream = own.from_rows(Endless(), ARRAYS).train_batches(4, 0)
    batches = iterate(stream, 0)
    for _ in range(3):
        next(batches)
    state = stream.state()
    next(batches)
    assert state == {"i": 12}
    again = own.from_rows(Endless(), ARRAYS).train_batches(4, 0)
    again.restore(state)
    for (t, batch), expected in zip(iterate(again, 3), whole[3:], strict=False):
        assert_same(batch, expected)
        if t == 5:
            break
    parts = [own.from_rows(Endless(), ARRAYS).train_batches(4, 0, part, 2).batch(0) for part in range(2)]
    assert_same(whole[0], joined(parts))


def test_batches_start_where_a_loop_of_one_s_own_says():
    rows = own.from_rows(ARRAYS)
    whole = list(itertools.islice(data.batches(rows, 4, seed=3), 9))
    rest = list(itertools.islice(data.batches(rows, 4, seed=3, start=7), 2))
    assert [t for t, _ in whole + rest] == [*range(9), 7, 8]
    for (_, ours), (_, expected) in zip(rest, whole[7:], strict=True):
        assert_same(ours, expected)
    in_order = own.from_rows(Endless(), ARRAYS)
    assert next(data.batches(in_order, 4))[0] == 0
    with pytest.raises(UserError, match="start must be 0 with data that are read in their own order"):
        next(data.batches(in_order, 4, start=7))


def test_an_iterator_without_a_state_is_refused():
    message = r"an iterator with get_state\(\) and set_state\(state\), .*; got generator"
    with pytest.raises(UserError, match=message):
        own.from_rows((row for row in Source()), ARRAYS)
    with pytest.raises(UserError, match="held_out must be given with an iterator"):
        own.from_rows(Endless())
    with pytest.raises(DataEnded, match="the iterator of the training data ended after 2 batches"):
        list(itertools.islice(iterate(own.from_rows(Endless(stop=11), ARRAYS).train_batches(4, 0)), 3))
    stream = own.from_rows(Endless(), ARRAYS).train_batches(4, 0)
    with pytest.raises(UserError, match="holds no state of the iterator"):
        stream.restore(None)


LANGUAGE_MODEL = LanguageModelConfig()


def experiment(model=LANGUAGE_MODEL, inputs="tokens", **options) -> Experiment:
    config = dataclasses.dataclass(frozen=True)(type("Mine", (DataConfig,), {"inputs": inputs}))
    return Experiment(model=model, data=config(), **options)


def test_the_model_takes_its_sizes_from_the_data():
    assert own.from_rows(ARRAYS).complete(experiment()).model.vocab_size == 9
    assert own.from_rows(Source()).complete(experiment()).model.vocab_size is None
    told = own.from_rows(Source(), encoding=IdsTokenizer(12))
    assert told.complete(experiment()).model.vocab_size == 12
    assert own.from_rows(Source(), sizes={"vocab_size": 10}).complete(experiment()).model.vocab_size == 10
    with pytest.raises(UserError, match="logging.sample_prompt must be None with data without a tokenizer"):
        own.from_rows(ARRAYS).complete(experiment(logging=LoggingConfig(sample_prompt="1")))
    with pytest.raises(UserError, match="inputs of Mine must be 'images', as its load says, got 'tokens'"):
        own.from_rows(ARRAYS, inputs="images").complete(experiment())


def test_images_with_labels():
    pixels, labels = RNG.integers(0, 256, (20, 6, 5), np.uint8), np.arange(20) % 3
    data = own.from_images(pixels, labels)
    assert isinstance(data, ImageSet)
    model = ImageClassifierConfig(d_model=8, patch_size=(2, 2))
    full = data.complete(experiment(model, "images")).model
    assert (full.image_size, full.channels, full.n_classes) == ((6, 5), 1, 3)
    floats = np.float32(pixels) / 255
    rows = own.from_images(floats, labels)
    assert rows.complete(experiment(model, "images")).model == full
    batch = rows.train_batches(4, 0)[0]
    assert (batch["inputs"].dtype, batch["inputs"].shape) == (np.float32, (4, 6, 5, 1))
    assert (batch["targets"].dtype, batch["targets"].shape) == (np.int32, (4,))
    np.testing.assert_array_equal(next(rows.eval_batches(2))["inputs"][..., 0], floats[18:])
    for images, classes, message in (
        (pixels, labels[:3], r"labels of images must be integers \[20\], got 'int64\[3\]'"),
        (pixels, labels - 1, "labels of images must be at least 0, got -1"),
        (np.int32(pixels), labels, r"images must be uint8 or floating point .* got 'int32"),
    ):
        with pytest.raises(UserError, match=message):
            own.from_images(images, classes)


def test_tokens_in_windows():
    tokens = np.arange(100) % 7
    data = own.from_tokens(tokens, 8)
    assert (data.tokenizer, data.kind, data.n_held_out) == (IdsTokenizer(7), "tokens", 9)
    batch = data.train_batches(3, 0)[0]
    np.testing.assert_array_equal(batch["targets"], (batch["inputs"] + 1) % 7)
    letters = own.from_tokens(tokens, 8, tokenizer=CharactersTokenizer("abcdefg"))
    assert letters.tokenizer.decode(letters.prompt(None)[:3]) == "gab"
    sums = {"count": 2.0, "nats": 2.0, "correct": 1.0, "probability": 1.0}
    assert data.metrics(sums) == {"perplexity": pytest.approx(np.e), "accuracy": 0.5, "probability": 0.5}
    with pytest.raises(UserError, match=r"tokens must be a one-dimensional array.* got 'float32\[100\]'"):
        own.from_tokens(np.float32(tokens), 8)
    with pytest.raises(UserError, match="must be ids below the vocabulary's size 3"):
        own.from_tokens(tokens, 8, tokenizer=CharactersTokenizer("abc"))


def test_fingerprints_tell_data_apart():
    def of(train, **options):
        return own.from_rows(train, **options).fingerprint

    changed = {**ARRAYS, "targets": ARRAYS["targets"] + (np.arange(20) == 11)[:, None]}
    found = [
        of(ARRAYS), of(changed), of(ARRAYS, held_out=ARRAYS), of(ARRAYS, encoding=IdsTokenizer(9)),
        of(ARRAYS, encoding=[1]), of(Source()), of(Source(19)), of(Source(targets=np.zeros(5, int))),
    ]  # fmt: skip
    assert len({*found}) == len(found)
    assert found[0] == of({name: values.copy() for name, values in ARRAYS.items()})
    named = Source()
    named.fingerprint = "mine, version 2"
    assert of(named) != of(Source())
    assert of(Endless(), held_out=ARRAYS) == of(Endless(), held_out=ARRAYS)


@pytest.mark.parametrize("encoding", [None, IdsTokenizer(9), {"mean": 0.5}, [1, 2]])
def test_a_run_keeps_the_encoding(encoding):
    assert encoding_from_json(own.from_rows(ARRAYS, encoding=encoding).to_json()) == encoding


def test_a_tokenizer_of_a_class_of_ones_own_is_refused():
    class Words(IdsTokenizer):
        """Neither it nor its words would be there when a run is opened again."""

    message = r"must be one of hyena_jax.data.tokenizers, .*, got 'Words'"
    with pytest.raises(UserError, match=message):
        own.from_rows(ARRAYS, encoding=Words(9))
    with pytest.raises(UserError, match=message):
        own.from_tokens(np.arange(90) % 9, 8, tokenizer=Words(9))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({**ARRAYS, "inputs": WINDOWS[:3]}, "rows of the arrays must be equal in number"),
        ({**ARRAYS, "inputs": [[1, 2], [3]]}, "arrays must have rows of one shape"),
        ({**ARRAYS, "targets": 3}, "targets must be an array of rows, got 3"),
        ({**ARRAYS, "targets": WINDOWS[:, 1:] + 2**32}, "targets must be numbers of 32 bits, got 4294967"),
        ([{"inputs": [[1], [2, 3]], "targets": 0}] * 2, "inputs of a row must be an array: .*inhomogeneous"),
        ({"inputs": WINDOWS}, r"a row must be a dict with inputs, targets and .* got \['inputs'\]"),
        ({**ARRAYS, "mask": WEIGHTS}, "a row must be a dict with inputs"),
        ({**ARRAYS, "weights": WEIGHTS[:, :2]}, r"weights of a row must be of the shape \(5,\)"),
        ({**ARRAYS, "weights": WEIGHTS - 1}, "weights must be finite and at least 0, got -1.0"),
        ({**ARRAYS, "weights": WEIGHTS + 1, "targets": WINDOWS[:, 1:] - 1}, "targets.* must be at least 0"),
        ({**ARRAYS, "inputs": WINDOWS[:, 1:] - 1}, "inputs (of a row )?must be at least 0, got -1"),
        ({**ARRAYS, "inputs": WINDOWS[:, 1:] * 0.5}, "inputs of a row must be integers, the ids of tokens"),
        ({**ARRAYS, "targets": WINDOWS.astype(str)}, "targets of a row must be integers or floating point"),
        ({name: values[:1] for name, values in ARRAYS.items()}, "train must be at least 2 rows"),
        (3, "train must be arrays, a random-access source"),
    ],
)
def test_wrong_rows_are_refused(train, message):
    with pytest.raises(UserError, match=message):
        own.from_rows(train)


ONES, LEAST = np.ones(5), np.array([0, 0, -100, 0, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Indexing would count it from the end. Without a weight, a target may be any number.
        ({"inputs": LEAST, "weights": ONES}, "inputs of a row must be at least 0.*, got -100"),
        ({"targets": LEAST, "weights": ONES}, "targets of a row must be at least 0.*, got -100"),
        ({"targets": LEAST, "weights": LEAST == 0}, None),
        ({"inputs": np.full(5, 50)}, "inputs of a row must be ids below the vocabulary's size 50, got 50"),
        ({"targets": np.full(5, 50)}, "targets of a row must be ids below the vocabulary's size 50, got 50"),
        ({"targets": np.zeros(4, int)}, "a row must be as the first|must be of the shape"),
    ],
)
def test_a_later_row_unlike_the_others_is_refused(changes, message):
    data = own.from_rows(Source(**changes), ARRAYS, sizes={"vocab_size": 50})
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        data.train_batches(20, 0)[0]


@pytest.mark.parametrize(
    ("train", "sizes", "message"),
    [
        (Source(), {"vocab_size": 50}, "targets must be at least 0.*, got -1"),
        (ARRAYS, {"vocab_size": 8}, "inputs and targets must be ids below the vocabulary's size 8, got 8"),
    ],
)
def test_every_held_out_row_of_arrays_is_checked(train, sizes, message):
    targets = ARRAYS["targets"].copy()
    if train is not ARRAYS:
        targets[1] = -1
    with pytest.raises(UserError, match=message):
        own.from_rows(train, {**ARRAYS, "targets": targets}, sizes=sizes)


def test_a_model_of_rows_without_tokens_has_the_smallest_vocabulary():
    nothing = np.zeros((4, 0), int)
    assert own.from_rows({"inputs": nothing, "targets": nothing}).sizes["vocab_size"] == 2
