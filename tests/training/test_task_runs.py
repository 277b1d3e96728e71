"""Runs on a task: evaluation speaks the task's metric, and the positions stay with their rows."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from rich.console import Console
from whole_runs import rows, saved, with_training

import hyena_jax
from hyena_jax import cli
from hyena_jax.config import HyenaConfig, ParallelConfig
from hyena_jax.data.dataset import load
from hyena_jax.distillation.model import make_comparison_step
from hyena_jax.system.errors import UserError
from hyena_jax.tasks.recall import MQARConfig
from hyena_jax.training.run import train

# Its tests share runs.
pytestmark = [pytest.mark.xdist_group("task_runs"), pytest.mark.wide]

MQAR = MQARConfig(vocab_size=16, seq_len=16, n_pairs=3, test_rows=12, batch_size=4)


@pytest.fixture(scope="module")
def on_mqar(settings):
    """The usual run, on MQAR and without dropout."""
    return dataclasses.replace(settings, data=MQAR, model=dataclasses.replace(settings.model, dropout=0.0))


@pytest.fixture(scope="module")
def trained(_compiled_once, on_mqar, tmp_path_factory):
    """That run; what it said is in mqar.txt."""
    run = tmp_path_factory.mktemp("runs") / "mqar"
    with run.with_suffix(".txt").open("w") as said:
        train(on_mqar, run, Console(file=said, width=120))
    return run


def test_a_run_speaks_of_answers_and_their_accuracy(trained):
    last = rows(trained)[-1]
    assert {"validation/loss", "validation/accuracy", "validation/sequence_accuracy"} <= {*last}
    assert not any("perplexity" in name for name in last)
    said = trained.with_suffix(".txt").read_text()
    for words in ("   accuracy 0.", "   sequence accuracy 0.", "answers/s"):
        assert words in said


def test_eval_speaks_the_task_s_metric_and_the_error_by_position(whole, tmp_path, capsys):
    batch, (_, model, params) = next(load(MQAR).eval_batches(12)), saved(whole)
    logits = np.asarray(jax.jit(model.apply)({"params": params}, batch["inputs"]))
    answers = np.take_along_axis(logits, batch["positions"][..., None], 1).argmax(-1)
    correct = answers == batch["targets"]
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
def test_a_mesh_trains_on_a_task_as_one_device_does(on_mqar, tmp_path, console):
    """Rows and parameters are sharded; the positions stay with their rows."""
    one = with_training(on_mqar, steps=3, eval_every=3)
    mesh = dataclasses.replace(
        one,
        parallel=ParallelConfig("sharded", devices=2, fsdp=2),
        optimizer=dataclasses.replace(one.optimizer, accumulation_steps=2),
    )
    train(one, tmp_path / "one", console)
    train(mesh, tmp_path / "mesh", console)
    expected, found = rows(tmp_path / "one")[-1], rows(tmp_path / "mesh")[-1]
    for name in ("validation/loss", "validation/accuracy"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5)


def test_positions_and_a_sharded_length_are_refused_before_anything_is_written(on_mqar, tmp_path, console):
    cut = dataclasses.replace(on_mqar, parallel=ParallelConfig("sharded", devices=2, sequence=2))
    message = "parallel.sequence must be 1 with data that score single positions, got 2"
    with pytest.raises(UserError, match=message):
        train(cut, tmp_path / "run", console)
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
def test_a_task_is_timed_and_its_runs_distilled(on_mqar, tmp_path, capsys):
    assert cli.main(["bench", "model", "tasks:mqar", "--least-runs", "2"]) == 0
    assert "answers/s" in capsys.readouterr().out
    model = dataclasses.replace(on_mqar.model, pattern=(HyenaConfig(),))
    hyena_jax.train(dataclasses.replace(on_mqar, model=model), tmp_path / "run", quiet=True)
    bound = ["--state-size", "8", "--max-loss-increase", "10"]
    assert cli.main(["distill", str(tmp_path / "run"), "--output", str(tmp_path / "new"), *bound]) == 0
