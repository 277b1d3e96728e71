import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest

from hyena_jax.config import UserError
from hyena_jax.data.dataset import iterate
from hyena_jax.data.text import Corpus
from hyena_jax.data.tokenizers import IdsTokenizer

TOKENS = np.arange(29, dtype=np.uint8)
SEQ_LEN = 7
N_OFFSETS = 22


def corpus(tokens, seq_len=SEQ_LEN):
    """These tokens to train on and to evaluate on."""
    options = {"tokenizer": IdsTokenizer(9), "fingerprint": "", "source": ""}
    return Corpus(train=tokens, held_out=tokens, seq_len=seq_len, **options)


def assert_batches_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name])


def offsets(dataset, n_batches):
    """The first tokens, which TOKENS makes equal to the offsets."""
    return np.concatenate([dataset[t]["inputs"][:, 0] for t in range(n_batches)])


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


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_every_epoch_holds_every_offset_once(batch_size):
    dataset = corpus(TOKENS).train_batches(batch_size, seed=3)
    order = offsets(dataset, -(-3 * N_OFFSETS // batch_size))[: 3 * N_OFFSETS].reshape(3, N_OFFSETS)
    for epoch in order:
        assert sorted(epoch) == list(range(N_OFFSETS))
    orders = {tuple(epoch) for epoch in order} | {tuple(range(N_OFFSETS))}
    assert len(orders) == 4


def test_seeds_decide_the_order():
    first, again, other = (offsets(corpus(TOKENS).train_batches(4, seed), 10) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert len(offsets(corpus(TOKENS).train_batches(4, 2**32 - 1), 10)) == 40


@pytest.mark.parametrize("process_count", [1, 2, 3, 12])
def test_processes_read_the_rows_of_the_global_batch(process_count):
    whole = corpus(TOKENS).train_batches(12, seed=1)
    parts = [corpus(TOKENS).train_batches(12, 1, index, process_count) for index in range(process_count)]
    for t in (0, 1, 17):
        assert parts[0][t]["inputs"].shape == (12 // process_count, SEQ_LEN)
        joined = {name: np.concatenate([part[t][name] for part in parts]) for name in ("inputs", "targets")}
        assert_batches_equal(joined, whole[t])


@pytest.mark.parametrize("start", [0, 1, 13, 10**9])
def test_batch_t_does_not_depend_on_where_iteration_starts(start):
    dataset = corpus(TOKENS).train_batches(4, seed=2)
    for t, batch in itertools.islice(iterate(dataset, start), 9):
        assert_batches_equal(batch, dataset[t])
    assert t == start + 8


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
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("5\n", "")


def test_wrong_arguments():
    with pytest.raises(UserError, match="batch_size must be a multiple of process_count=5, got 12"):
        corpus(TOKENS).train_batches(12, 0, 0, 5)


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
    inputs, targets, weights = (
        np.concatenate([batch[name] for batch in batches]) for name in ("inputs", "targets", "weights")
    )
    assert set(np.unique(weights)) <= {0, 1}
    np.testing.assert_array_equal(targets[weights == 1], tokens[1:])
    np.testing.assert_array_equal(inputs[weights == 1], tokens[:-1])
    assert not targets[weights == 0].any()
    assert not inputs[weights.sum(axis=1) == 0].any()


@pytest.mark.parametrize(
    ("max_windows", "chosen"), [(1, [0]), (2, [0, 10]), (3, [0, 5, 10]), (11, None), (99, None)]
)
def test_evaluation_on_evenly_spaced_windows(max_windows, chosen):
    tokens = np.arange(11 * SEQ_LEN + 1)
    batches = list(corpus(tokens).eval_batches(2, max_windows))
    assert len(batches) == -(-corpus(tokens).n_eval_rows(max_windows) // 2)
    inputs, weights = (np.concatenate([batch[name] for batch in batches]) for name in ("inputs", "weights"))
    starts = inputs[weights[:, 0] == 1, 0] // SEQ_LEN
    np.testing.assert_array_equal(starts, range(11) if chosen is None else chosen)


@pytest.mark.parametrize("max_windows", range(1, 12))
def test_evenly_spaced_windows_are_distinct(max_windows):
    tokens = np.arange(11 * SEQ_LEN + 1)
    batches = list(corpus(tokens).eval_batches(4, max_windows))
    weights, inputs = ([batch[name] for batch in batches] for name in ("weights", "inputs"))
    starts = np.concatenate(inputs)[np.concatenate(weights)[:, 0] == 1, 0]
    assert len(set(starts)) == max_windows
