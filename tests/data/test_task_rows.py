"""A task as a data set: batches, their positions and weights, fixed rows, metrics and fingerprints."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from hyena_jax.config import DATA_CONFIGS, TASK_CONFIGS, Experiment, LanguageModelConfig, TaskConfig, register
from hyena_jax.data.dataset import encoding_from_json, load
from hyena_jax.data.tasks import TaskRows
from hyena_jax.system.errors import UserError
from hyena_jax.tasks import Task, register_task, row
from hyena_jax.tasks.mad import MadRecallConfig
from hyena_jax.tasks.recall import MQARConfig, RecallConfig
from hyena_jax.tasks.states import ParityConfig
from hyena_jax.tasks.strings import CopyingConfig

MQAR = MQARConfig(vocab_size=16, seq_len=16, n_pairs=3, test_rows=10)


def test_training_and_test_batches_name_their_positions():
    batch = load(MQAR).train_batches(4, 0)[0]
    assert {x.dtype for x in batch.values()} == {np.dtype(np.int32)}
    shapes = {"inputs": (4, 16), "targets": (4, 3), "positions": (4, 3)}
    assert {name: x.shape for name, x in batch.items()} == shapes
    (test,) = load(MQAR).eval_batches(12)
    assert test["weights"].dtype == np.float32
    assert test["weights"].sum() == 30
    assert not test["weights"][10:].any()
    assert load(MQAR).n_held_out == 30
    recall = load(RecallConfig(seq_len=8))
    assert recall.train_batches(4, 0)[0].keys() == {"inputs", "targets"}
    assert recall.train_batches(4, 0)[0]["targets"].shape == (4, 10)
    assert next(recall.eval_batches(4))["targets"].shape == (4, 1)
    packed = load(CopyingConfig()).train_batches(4, 0)[0]
    assert packed.keys() == {"inputs", "targets", "weights"}


def test_rows_to_evaluate_on_depend_on_their_own_seed_and_have_their_own_length():
    whole, other = (next(load(config).eval_batches(10)) for config in (MQAR, replace(MQAR, test_seed=1)))
    assert (other["inputs"] != whole["inputs"]).any()
    longer = load(ParityConfig())
    assert next(longer.eval_batches(2))["inputs"].shape == (2, 64)
    assert longer.train_batches(2, 0)[0]["inputs"].shape == (2, 40)
    assert longer.row_shape == (64,)
    sizes = [(8, None), (8, 16), (16, None)]
    short, tested_longer, long = (load(CopyingConfig(max_len=n, test_max_len=m)).chance for n, m in sizes)
    assert tested_longer == long < short


def summed(data, wrong):
    """The sums of an evaluation in which `wrong(row, slot)` says which answers are wrong."""
    sums = {}
    for batch in data.eval_batches(4):
        n_rows, n = batch["targets"].shape
        correct = ~np.array([[wrong(batch["inputs"][i], j) for j in range(n)] for i in range(n_rows)])
        weights = batch["weights"]
        found = {name: tally(correct, batch["targets"], weights) for name, tally in data.tallies.items()}
        found |= {"count": weights.sum(-1), "correct": (correct * weights).sum(-1)}
        for name, value in found.items():
            sums[name] = sums.get(name, 0) + np.asarray(value, np.float64).sum(axis=0)
    return sums


def test_metrics_are_of_answers_of_whole_rows_and_by_position():
    data = load(MQAR)
    (batch,) = data.eval_batches(10)
    marked = {tuple(text) for text in batch["inputs"][:3]}
    sums = summed(data, lambda text, slot: slot == 1 and tuple(text) in marked)
    assert data.metrics(sums) == {"accuracy": pytest.approx(0.9), "sequence_accuracy": pytest.approx(0.7)}
    assert data.eval_metrics(sums) == {
        "error_at_0": 0.0, "error_at_1": pytest.approx(0.3), "error_at_2": 0.0
    }  # fmt: skip
    assert data.metrics({"correct": 3.0, "count": 4.0}) == {"accuracy": 0.75}
    assert data.metrics({}) == data.eval_metrics({}) == data.loss_metrics(1.0) == {}


def test_macro_accuracy_is_the_mean_over_classes_and_scaled_accuracy_is_0_at_chance():
    data = load(MadRecallConfig(vocab_size=8, seq_len=20, test_rows=30))
    (batch,) = data.eval_batches(30)
    answers = batch["targets"][batch["weights"] > 0]
    classes, counts = np.unique(answers, return_counts=True)
    sums = summed(data, lambda text, slot: False)
    first = classes[0]
    sums["correct_of"] = np.where(np.arange(8) == first, 0, sums["count_of"])
    sums["correct"] = float(counts[1:].sum())
    values = data.metrics(sums)
    assert values["macro_accuracy"] == pytest.approx(1 - 1 / len(classes))
    assert values["accuracy"] == pytest.approx(1 - counts[0] / answers.size)
    np.testing.assert_array_equal(sums["count_of"][classes], counts)
    assert data.curves.keys() == {"loss", "macro_accuracy", "accuracy", "sequence_accuracy"}
    weights, correct = np.array([[1, 0], [1, 1], [0, 0]]), np.array([[True, False]] * 3)
    whole = data.tallies["whole_rows"](correct, weights, weights)
    np.testing.assert_array_equal(whole, [1, 0, 0])  # padding is not asked for
    parity = load(ParityConfig())
    assert parity.metrics({"correct": 5.0, "count": 10.0})["scaled_accuracy"] == 0.0
    assert parity.metrics({"correct": 10.0, "count": 10.0})["scaled_accuracy"] == 1.0


def test_the_model_takes_its_vocabulary_and_must_read_a_row():
    experiment = Experiment(model=LanguageModelConfig(max_len=66), data=RecallConfig())
    assert load(RecallConfig()).complete(experiment).model.vocab_size == 12
    with pytest.raises(UserError, match=r"inputs of a row must be at most model.max_len=65 .*\(66,\)"):
        load(RecallConfig()).complete(replace(experiment, model=LanguageModelConfig(max_len=65)))
    with pytest.raises(UserError, match=r"data must be what the model reads \(tokens\)"):
        Experiment(data=TASK_CONFIGS["mad_compression"]())


def test_the_fingerprint_is_of_settings_and_rows():
    same, other = load(MQAR), load(replace(MQAR, n_pairs=2))
    assert load(MQAR).fingerprint == same.fingerprint != other.fingerprint
    assert load(replace(MQAR, test_seed=1)).fingerprint != same.fingerprint
    assert encoding_from_json(same.to_json()) is None


@dataclass(frozen=True)
class ReverseConfig(TaskConfig):
    """Say a row backwards."""

    vocab_size: int = 6
    seq_len: int = 5


def reverse(rng, config):
    data = rng.integers(config.vocab_size, size=config.seq_len)
    return row(np.concatenate([data, np.zeros_like(data)]), data[::-1], config.seq_len + np.arange(len(data)))


def test_a_task_of_ones_own_is_a_config_and_a_function(own_parts):
    task = Task(reverse, lambda config: 1 / config.vocab_size)
    register_task("reverse", ReverseConfig, task.draw, task.chance)
    assert TASK_CONFIGS["reverse"] is DATA_CONFIGS["reverse"] is ReverseConfig
    data = load(ReverseConfig(batch_size=3))
    batch = data.train_batches(3, 0)[0]
    np.testing.assert_array_equal(batch["targets"], batch["inputs"][:, 4::-1])
    assert list(data.task.all_presets(ReverseConfig)) == ["small"]
    # A function that loads the rows may be registered too, in the place of the first.
    register("reverse", ReverseConfig, lambda config, encoding: TaskRows(task, config))
    assert load(ReverseConfig(batch_size=3)).fingerprint == data.fingerprint
