"""Runs that stop early, at the first evaluation that reaches their target."""

import dataclasses
from types import SimpleNamespace

import pytest
from whole_runs import rows, with_training

from hyena_jax.data.dataset import load
from hyena_jax.system.errors import UserError
from hyena_jax.tasks.arithmetic import MajorityConfig
from hyena_jax.training.checkpoint import Meta, saved_steps
from hyena_jax.training.evaluate import is_reached, measured_on
from hyena_jax.training.run import already_done, train


@pytest.mark.parametrize(
    ("until", "missed"),
    [
        ("loss=2", "loss=1.9"),
        ("perplexity=7.4", "perplexity=7.38"),
        ("bits_per_byte=1.4", "bits_per_byte=1.3"),
        ("accuracy=0.5", "accuracy=0.51"),
    ],
)
def test_losses_reach_a_target_from_above_and_all_else_from_below(until, missed):
    values = {"loss": 2.0, "perplexity": 7.39, "bits_per_byte": 1.4, "accuracy": 0.5}
    assert (is_reached(until, values), is_reached(missed, values)) == (True, False)


def test_losses_are_those_of_equal_rows_or_not_compared():
    data = load(MajorityConfig(seq_len=8, test_rows=8, batch_size=4))
    assert measured_on(data) == measured_on(data, 8) != measured_on(data, 4)


def test_a_run_stops_at_the_first_evaluation_that_reaches_its_target(whole, experiment, tmp_path, console):
    losses = {row["step"]: row["validation/loss"] for row in rows(whole) if "validation/loss" in row}
    assert [*losses] == [4, 8, 12]
    early = with_training(experiment, until=f"loss={losses[8]}")
    run = tmp_path / "early"
    train(early, run, console)
    assert saved_steps(run / "checkpoints")[0] == 8
    assert "reached loss=" in console.file.getvalue()
    assert rows(run)[-1]["step"] == 8

    (run / "learning_curves.png").unlink()
    train(early, run, console)  # which is done
    assert "already reached loss=" in console.file.getvalue()
    assert saved_steps(run / "checkpoints")[0] == 8
    assert (run / "learning_curves.png").exists()


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (Meta(4, reached="loss=2", measured_on="these"), "already reached loss=2 at step 4"),
        (Meta(4, reached="loss=2", measured_on="others"), None),
        (Meta(4, reached="loss=3", measured_on="these"), None),
        (Meta(10), "already trained to step 10"),
        (Meta(10, unevaluated=True), None),  # the evaluation that was cut short is made first
        (None, None),
    ],
)
def test_a_run_is_done_when_it_reached_its_target_on_these_rows_or_its_last_step(meta, says):
    training = SimpleNamespace(until="loss=2", steps=10)
    setup = SimpleNamespace(experiment=SimpleNamespace(training=training), measured_on="these")
    found = already_done(setup, meta, 0 if meta is None else meta.step)
    assert found is None if says is None else found.startswith(says)


@pytest.mark.parametrize("until", ["accuracy", "=1", "accuracy=x", "accuracy=inf"])
def test_a_target_that_is_none_is_refused(experiment, until):
    with pytest.raises(UserError, match="until must be NAME=VALUE"):
        dataclasses.replace(experiment.training, until=until)
