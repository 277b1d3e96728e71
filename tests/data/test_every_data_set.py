"""What every data set promises: batches to train on are a function of (seed, t), held-out rows come once."""

import itertools

import numpy as np
import pytest
from idx_files import random_images
from own_rows import ARRAYS, Source, assert_same, joined

from hyena_jax.data import own
from hyena_jax.data.dataset import iterate, load
from hyena_jax.system.errors import UserError
from hyena_jax.tasks.recall import MQARConfig

IMAGES, LABELS = random_images(29)
MQAR = {"vocab_size": 16, "seq_len": 16, "n_pairs": 3, "test_rows": 10}
DATA = {
    "tokens": (lambda: own.from_tokens(np.arange(100), 7), 83, 2),
    "arrays": (lambda: own.from_rows(ARRAYS, ARRAYS), 20, 20),
    "rows": (lambda: own.from_rows(Source(), Source()), 20, 20),
    "images": (lambda: own.from_images(IMAGES, LABELS), 26, 3),
    "a task": (lambda: load(MQARConfig(**MQAR)), None, 10),
    "a task of few rows": (lambda: load(MQARConfig(**MQAR, train_rows=32)), 32, 10),
}
"""The data, and how many rows they have to train and to evaluate on; None: endlessly many."""


@pytest.fixture(params=DATA)
def data(request):
    make, n_train, n_held_out = DATA[request.param]
    return make(), n_train, n_held_out


def test_batch_t_is_a_function_of_seed_and_t_for_any_number_of_processes(data):
    made, *_ = data
    batches = made.train_batches(6, seed=3)
    assert_same(batches[5], made.train_batches(6, seed=3)[5])
    assert (batches[5]["inputs"] != made.train_batches(6, seed=4)[5]["inputs"]).any()
    parts = [made.train_batches(6, 3, part, 3)[5] for part in range(3)]
    assert {len(part["inputs"]) for part in parts} == {2}
    assert_same(joined(parts), batches[5])
    for t, batch in itertools.islice(iterate(batches, 5), 3):
        assert_same(batch, batches[t])
    assert t == 7
    with pytest.raises(UserError, match="batch_size must be a multiple of process_count=5, got 6"):
        made.train_batches(6, 0, 0, 5)


def test_every_epoch_holds_every_row_once_in_its_own_order(data):
    """Of some data an epoch has less rows than a batch."""
    made, n, _ = data
    batch_size = 23
    batches, n_rows = made.train_batches(batch_size, seed=2**32 - 1), 3 * (n or 20)
    found = [x.tobytes() for t in range(-(-n_rows // batch_size)) for x in batches[t]["inputs"]][:n_rows]
    if n is None:
        assert len({*found}) == n_rows
        return
    epochs = [found[i : i + n] for i in (0, n, 2 * n)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len({*epochs[0]}) == n
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("batch_size", [3, 100])
def test_every_held_out_row_is_judged_once(data, batch_size):
    made, _, n = data
    rows = made.held_out_rows(np.arange(n))
    weights = rows.get("weights", np.ones(rows["targets"].shape)).astype(np.float32)
    batches = list(made.eval_batches(batch_size))
    assert {len(batch["inputs"]) for batch in batches} == {batch_size}
    found = joined(batches)
    assert_same({name: x[:n] for name, x in found.items()}, {**rows, "weights": weights})
    assert len(found["inputs"]) == batch_size * -(-n // batch_size)
    assert not any(x[n:].any() for x in found.values())
    assert made.n_eval_rows() == n
    assert made.n_held_out == weights.sum()


def test_some_held_out_rows_are_evenly_spaced(data):
    made, _, n = data
    for most in (1, 2, n, n + 1):
        found = joined(list(made.eval_batches(2, most)))
        chosen = np.rint(np.linspace(0, n - 1, min(most, n))).astype(int)
        np.testing.assert_array_equal(found["inputs"][: len(chosen)], made.held_out_rows(chosen)["inputs"])
        assert len(found["inputs"]) == 2 * -(-len(chosen) // 2)
        assert made.n_eval_rows(most) == len(chosen)
