import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
from new_process import output_of
from own_rows import joined

from hyena_jax.config import DataConfig, Experiment, LanguageModelConfig, LoggingConfig, register
from hyena_jax.data.dataset import Dataset, encoding_from_json, iterate, load
from hyena_jax.data.text import Corpus
from hyena_jax.data.tokenizers import CharactersTokenizer, IdsTokenizer
from hyena_jax.system.errors import UserError

TOKENS = np.arange(29, dtype=np.uint8)
SEQ_LEN = 7


def corpus(tokens, seq_len=SEQ_LEN):
    """These tokens to train on and to evaluate on."""
    options = {"tokenizer": IdsTokenizer(9), "fingerprint": "", "source": ""}
    return Corpus(train=tokens, held_out=tokens, seq_len=seq_len, **options)


def test_windows_and_their_shift():
    tokens = np.random.default_rng(0).integers(0, 50_000, 100).astype(np.uint16)
    batch = corpus(tokens, seq_len=9).train_batches(5, seed=0)[3]
    windows = {tuple(tokens[i : i + 10]) for i in range(91)}
    assert batch.keys() == {"inputs", "targets"}
    for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
        assert (*inputs, targets[-1]) in windows
        np.testing.assert_array_equal(inputs[1:], targets[:-1])
    for part in batch.values():
        assert part.shape == (5, 9)
        assert part.dtype == np.int32


def test_closing_the_iterator_ends_its_thread():
    batches = iterate(corpus(TOKENS).train_batches(4, seed=0), 0)
    next(batches)
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]
    assert workers
    batches.close()
    for thread in workers:
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.mark.grid
def test_an_open_iterator_does_not_hold_up_the_end_of_the_program():
    code = (
        "import numpy as np; from hyena_jax.data import own; from hyena_jax.data.dataset import iterate;"
        "batches = iterate(own.from_tokens(np.arange(99), 8).train_batches(4, seed=0), 5);"
        "print(next(batches)[0])"
    )
    assert output_of(code) == "5\n"


@pytest.mark.parametrize("n_tokens", [2, 7, 8, 9, 15, 22, 23, 101, 113])
@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_evaluation_predicts_every_token_once(n_tokens, batch_size):
    tokens = np.random.default_rng(n_tokens).integers(1, 1000, n_tokens).astype(np.uint16)
    batches = list(corpus(tokens).eval_batches(batch_size))
    assert len(batches) == -(-corpus(tokens).n_eval_rows() // batch_size)
    for batch in batches:
        assert {name: (part.shape, part.dtype) for name, part in batch.items()} == {
            "inputs": ((batch_size, SEQ_LEN), np.int32),
            "targets": ((batch_size, SEQ_LEN), np.int32),
            "weights": ((batch_size, SEQ_LEN), np.float32),
        }
    inputs, targets, weights = joined(batches).values()
    assert set(np.unique(weights)) <= {0, 1}
    np.testing.assert_array_equal(targets[weights == 1], tokens[1:])
    np.testing.assert_array_equal(inputs[weights == 1], tokens[:-1])
    assert not targets[weights == 0].any()
    assert not inputs[weights.sum(axis=1) == 0].any()


@dataclass(frozen=True)
class SquaresConfig(DataConfig):
    """Data by hand."""


class Squares(Dataset):
    """Row i is i, i^2, i^3 modulo 10, of which the last is predicted."""

    fingerprint, n_train_rows, n_held_out_rows = "squares", 7, 5
    tokenizer = CharactersTokenizer("0123456789")

    def train_rows(self, indices):
        powers = indices[:, None] ** np.arange(1, 4) % 10
        return {"inputs": powers[:, :2], "targets": powers[:, 2]}

    def held_out_rows(self, indices):
        return self.train_rows(indices + 7)


def test_two_methods_and_a_tokenizer_are_a_data_set(own_parts):
    register("squares", SquaresConfig, lambda config, encoding: Squares())
    data = load(SquaresConfig())
    rows = np.concatenate([data.train_batches(2, seed=0)[t]["inputs"] for t in range(7)])
    assert sorted(rows[:7, 0]) == sorted(rows[7:, 0]) == list(range(7))
    assert [batch["weights"].tolist() for batch in data.eval_batches(3)] == [[1, 1, 1], [1, 1, 0]]
    assert (data.n_held_out, data.n_eval_rows(2), data.units_per_row, data.row_shape) == (5, 2, 1, (2,))
    assert data.prompt(None).tolist() == [7, 9]
    assert data.prompt("42").tolist() == [4, 2]
    assert encoding_from_json(data.to_json()) == data.tokenizer
    model = LanguageModelConfig(max_len=2)
    experiment = Experiment(model=model, data=SquaresConfig(), logging=LoggingConfig(sample_prompt="1"))
    assert data.complete(experiment).model.vocab_size == 10
    for changes, message in (
        ({"logging": LoggingConfig(sample_prompt="a")}, "logging.sample_prompt 'a': text must hold"),
        ({"model": LanguageModelConfig(max_len=1)}, r"inputs of a row must be at most .*=1 .*\(2,\)"),
        ({"model": LanguageModelConfig(vocab_size=9)}, "model.vocab_size must be at least the data's 10"),
    ):
        with pytest.raises(UserError, match=message):
            data.complete(replace(experiment, **changes))


def test_what_is_not_a_data_set_is_refused_in_one_line(own_parts):
    class ByHand:
        kind, fingerprint = "rows", "by hand"

    class Unread(Dataset):
        n_train_rows = n_held_out_rows = 3
        fingerprint = "unread"

    class Endless(Squares):
        def __init__(self):
            self.n_train_rows = None

    class Whole(Dataset):
        """Data that only make batches need neither rows nor their numbers."""

        fingerprint, train_batches, eval_batches = "whole", None, None

    class Nameless(Whole):
        def __dir__(self):
            return [name for name in super().__dir__() if name != "fingerprint"]

    def loaded(made):
        register("squares", SquaresConfig, lambda config, encoding: made)
        return load(SquaresConfig())

    for made in (Endless(), Whole()):
        assert loaded(made) is made
    for made, message in (
        (ByHand(), "must be a hyena_jax.data.dataset.Dataset, got 'ByHand'"),
        (None, "must be a hyena_jax.data.dataset.Dataset, got 'NoneType'"),
        (
            Unread(),
            "must be a Dataset with fingerprint, train_rows, .*'Unread without train_rows, held_out_rows'",
        ),
        (Nameless(), "must be a Dataset with fingerprint, got 'Nameless without fingerprint'"),
    ):
        with pytest.raises(UserError, match=f"what SquaresConfig loads {message}"):
            loaded(made)
