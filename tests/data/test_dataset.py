import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
from own_rows import joined

from hyena_jax.config import DataConfig, Experiment, LanguageModelConfig, LoggingConfig, register
from hyena_jax.data.dataset import Dataset, encoding_from_json, iterate, load, perplexity
from hyena_jax.data.text import Corpus
from hyena_jax.data.tokenizers import CharactersTokenizer, IdsTokenizer
from hyena_jax.system.errors import UserError

TOKENS = np.arange(29, dtype=np.uint8)
SEQ_LEN = 7


def corpus(tokens):
    """These tokens to train on and to evaluate on."""
    options = {"tokenizer": IdsTokenizer(9), "fingerprint": "", "source": ""}
    return Corpus(train=tokens, held_out=tokens, seq_len=SEQ_LEN, **options)


def test_closing_the_iterator_ends_its_thread():
    batches = iterate(corpus(TOKENS).train_batches(4, seed=0), 0)
    next(batches)
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]
    assert workers
    batches.close()
    for thread in workers:
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.mark.parametrize("n_tokens", [2, 8, 9, 23, 113])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_evaluation_predicts_every_token_once(n_tokens, batch_size):
    tokens = np.random.default_rng(n_tokens).integers(1, 1000, n_tokens).astype(np.uint16)
    batches = list(corpus(tokens).eval_batches(batch_size))
    assert len(batches) == -(-corpus(tokens).n_eval_rows() // batch_size)
    shape = (batch_size, SEQ_LEN)
    forms = {"inputs": (shape, np.int32), "targets": (shape, np.int32), "weights": (shape, np.float32)}
    for batch in batches:
        assert {name: (part.shape, part.dtype) for name, part in batch.items()} == forms
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

    class Whole(Dataset):
        """Data that only make batches need neither rows nor their numbers."""

        fingerprint, train_batches, eval_batches = "whole", None, None

    def loaded(made):
        register("squares", SquaresConfig, lambda config, encoding: made)
        return load(SquaresConfig())

    whole = Whole()
    assert loaded(whole) is whole
    for made, message in (
        (ByHand(), "must be a hyena_jax.data.dataset.Dataset, got 'ByHand'"),
        (Unread(), "must be a Dataset with fingerprint, .*'Unread without train_rows, held_out_rows'"),
    ):
        with pytest.raises(UserError, match=f"what SquaresConfig loads {message}"):
            loaded(made)


def test_perplexity_overflows_to_a_number():
    assert perplexity(0.0) == 1.0
    assert perplexity(1e6) == pytest.approx(1.0142320547350045e304)
