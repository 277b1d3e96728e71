"""Runs on a task: they stop and continue exactly, and evaluation speaks the task's metric."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console
from whole_runs import evaluated, rows, saved, with_training

import hyena_jax
from hyena_jax import cli
from hyena_jax.config import (
    NO_DECAY,
    AdamWConfig,
    AttentionConfig,
    CosineConfig,
    Experiment,
    HyenaConfig,
    LanguageModelConfig,
    LoggingConfig,
    ParallelConfig,
    TrainingConfig,
)
from hyena_jax.data.dataset import load
from hyena_jax.distillation.model import make_comparison_step
from hyena_jax.system.errors import UserError
from hyena_jax.tasks.mad import MadRecallConfig
from hyena_jax.tasks.recall import MQARConfig, RecallConfig
from hyena_jax.tasks.strings import CopyingConfig
from hyena_jax.training.run import train

# Its tests share runs.
pytestmark = [pytest.mark.xdist_group("task_runs"), pytest.mark.wide]

MQAR = MQARConfig(vocab_size=16, seq_len=16, n_pairs=3, test_rows=12, batch_size=4)


def on(data, **options):
    """A run of a second on a task: 12 steps, checkpoints at 5 and 10, evaluations at 4, 8 and 12."""
    return Experiment(
        model=LanguageModelConfig(
            pattern=(AttentionConfig(2),),
            n_layers=1,
            d_model=8,
            d_ff=8,
            max_len=max(load(data).row_shape[0], 16),
        ),
        data=data,
        optimizer=AdamWConfig(schedule=CosineConfig(warmup_steps=2), groups=(NO_DECAY,)),
        training=TrainingConfig(steps=12, eval_every=4, eval_batch_size=8, checkpoint_every=5, log_every=3),
        logging=LoggingConfig(tensorboard=False),
        **{"parallel": ParallelConfig(devices=1), **options},
    )


@pytest.fixture(scope="module")
def trained_on_mqar(_compiled_once, tmp_path_factory):
    """A run on MQAR; what it said is in mqar.txt."""
    run = tmp_path_factory.mktemp("runs") / "mqar"
    with run.with_suffix(".txt").open("w") as said:
        train(on(MQAR), run, Console(file=said, width=120))
    return run


@pytest.fixture
def whole(trained_on_mqar, tmp_path):
    """A copy of a run on MQAR that was never stopped."""
    return shutil.copytree(trained_on_mqar, tmp_path / "whole")


def by_hand(workdir, data):
    """correct bool [rows, n], targets and weights, from all logits of the trained model."""
    _, model, params = saved(workdir)
    batch = next(data.eval_batches(data.config.test_rows))
    logits = np.asarray(jax.jit(model.apply)({"params": params}, batch["inputs"]))
    if "positions" in batch:
        logits = np.take_along_axis(logits, batch["positions"][..., None], 1)
    return logits.argmax(-1) == batch["targets"], batch["targets"], batch["weights"]


def test_a_run_speaks_of_answers_and_their_accuracy(trained_on_mqar):
    last = rows(trained_on_mqar)[-1]
    assert {"validation/loss", "validation/accuracy", "validation/sequence_accuracy"} <= {*last}
    assert not any("perplexity" in name for name in last)
    said = trained_on_mqar.with_suffix(".txt").read_text()
    for words in ("   accuracy 0.", "   sequence accuracy 0.", "answers/s"):
        assert words in said


def test_eval_speaks_the_task_s_metric_and_the_error_by_position(whole, tmp_path, capsys):
    correct, _, _ = by_hand(whole, load(MQAR))
    output = tmp_path / "metrics.json"
    assert cli.main(["eval", str(whole), "--output", str(output), "--batch-size", "5"]) == 0
    shown = capsys.readouterr().out
    values = json.loads(output.read_text())
    assert values["accuracy"] == pytest.approx(correct.mean())
    assert values["sequence_accuracy"] == pytest.approx(correct.all(-1).mean())
    assert [values[f"error_at_{i}"] for i in range(3)] == pytest.approx(list(1 - correct.mean(0)))
    assert (values["step"], values["answers"]) == (12, 36)
    assert "sequence_accuracy" in shown
    errors = "  ".join(f"{error:.3f}" for error in 1 - correct.mean(0))
    assert f"error by scored position of a row, from 0:\n     0  {errors}\n" in shown
    for path, must in ((output, "that does not exist yet"), (tmp_path / "no" / "x", "in an existing folder")):
        assert cli.main(["eval", str(whole), "--output", str(path)]) == 2
        assert f"--output must be a file {must}" in capsys.readouterr().err


@pytest.mark.grid
@pytest.mark.parametrize(
    "config",
    [
        MadRecallConfig(vocab_size=6, seq_len=12, test_rows=9, batch_size=4),
        CopyingConfig(n_letters=3, max_len=4, row_len=20, test_rows=9),
    ],
    ids=["mad_recall", "copying"],
)
def test_masked_and_macro_metrics_are_those_computed_by_hand(config, tmp_path, console):
    train(on(config), tmp_path / "run", console)
    data, values = load(config), evaluated(tmp_path / "run", batch_size=4)
    correct, targets, weights = by_hand(tmp_path / "run", data)
    scored = weights > 0
    assert values["accuracy"] == pytest.approx(correct[scored].mean())
    assert values["sequence_accuracy"] == pytest.approx((correct | ~scored).all(-1).mean())
    assert values["answers"] == scored.sum()
    if "macro_accuracy" in data.metric_names:
        recalls = [correct[scored & (targets == y)].mean() for y in np.unique(targets[scored])]
        assert values["macro_accuracy"] == pytest.approx(np.mean(recalls))


@pytest.mark.grid
@pytest.mark.parametrize(("devices", "accumulated"), [(4, 1), (2, 2)])
def test_a_mesh_trains_on_a_task_as_one_device_does(devices, accumulated, tmp_path, console):
    """Rows and parameters are sharded; the positions stay with their rows."""
    experiment = with_training(on(MQAR), steps=3, eval_every=3)
    train(experiment, tmp_path / "one", console)
    optimizer = dataclasses.replace(experiment.optimizer, accumulation_steps=accumulated)
    mesh = ParallelConfig("sharded", devices=devices, fsdp=2)
    train(dataclasses.replace(experiment, parallel=mesh, optimizer=optimizer), tmp_path / "mesh", console)
    one, four = rows(tmp_path / "one")[-1], rows(tmp_path / "mesh")[-1]
    for name in ("validation/loss", "validation/accuracy"):
        assert four[name] == pytest.approx(one[name], abs=1e-5)


def test_positions_and_a_sharded_length_are_refused_before_anything_is_written(tmp_path, console):
    parallel = ParallelConfig("sharded", devices=2, sequence=2)
    message = "parallel.sequence must be 1 with data that score single positions, got 2"
    with pytest.raises(UserError, match=message):
        train(on(MQAR, parallel=parallel), tmp_path / "run", console)
    assert not (tmp_path / "run").exists()


@pytest.mark.grid
def test_kl_of_two_models_is_summed_over_the_scored_positions(whole):
    data, (_, model, params) = load(MQAR), saved(whole)
    other = jax.tree.map(lambda x: 0.9 * x, params)
    batch = next(data.eval_batches(12))
    sums = jax.jit(make_comparison_step(model, model))((params, other), batch)
    p, q = (np.asarray(model.apply({"params": x}, batch["inputs"]), np.float64) for x in (params, other))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    kl = np.take_along_axis((np.exp(p) * (p - q)).sum(-1), batch["positions"], 1)
    np.testing.assert_allclose(sums["kl"], kl.sum(-1), rtol=1e-3, atol=1e-7)


@pytest.mark.grid
def test_a_task_is_timed_and_its_runs_distilled(whole, tmp_path, capsys):
    assert cli.main(["bench", "model", "tasks:mqar", "--least-runs", "2"]) == 0
    assert "answers/s" in capsys.readouterr().out
    small = on(RecallConfig(seq_len=8, test_rows=8, batch_size=4))
    small = dataclasses.replace(small, model=dataclasses.replace(small.model, pattern=(HyenaConfig(),)))
    hyena_jax.train(small, tmp_path / "run", quiet=True)
    bound = ["--state-size", "8", "--max-loss-increase", "10"]
    assert cli.main(["distill", str(tmp_path / "run"), "--output", str(tmp_path / "new"), *bound]) == 0


def test_other_test_rows_are_another_experiment(whole, console):
    with pytest.raises(UserError, match=r"data.test_seed: 0 -> 1"):
        train(on(dataclasses.replace(MQAR, test_seed=1)), whole, console)
