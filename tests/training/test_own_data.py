"""Runs on a user's own rows stop, continue and end like runs on text."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from whole_runs import evaluated, rows, with_training

from hyena_jax.config import CrossEntropyConfig, DataConfig, LossConfig, TopKAccuracyConfig, register
from hyena_jax.data import own
from hyena_jax.data.tokenizers import IdsTokenizer
from hyena_jax.system.errors import UserError
from hyena_jax.training.checkpoint import Meta, best, saved_steps
from hyena_jax.training.hooks import LiveRun
from hyena_jax.training.run import train


@dataclass(frozen=True)
class OwnConfig(DataConfig):
    stop: int | None = None
    held_out_weight: float = 1.0


@dataclass(frozen=True)
class MeanConfig(LossConfig):
    pass


class Drawn:
    """An endless iterator over random rows; its state is the generator's state."""

    def __init__(self, stop):
        self.rng, self.n, self.stop = np.random.default_rng(3), 0, stop

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == self.stop:
            raise StopIteration
        self.n += 1
        return row_of(self.rng)

    def get_state(self):
        return {"rng": self.rng.bit_generator.state, "n": self.n}

    def set_state(self, state):
        self.rng.bit_generator.state, self.n = state["rng"], state["n"]


def row_of(rng):
    """Counting up from a random start; the first half of the targets has weight 0."""
    window = (np.arange(9) + rng.integers(7)) % 7
    return {"inputs": window[:-1], "targets": window[1:], "weights": np.arange(8) >= 4}


def load(config, encoding):
    rng = np.random.default_rng(0)
    held_out = [row_of(rng) for _ in range(6)]
    held_out = [{**row, "weights": config.held_out_weight * row["weights"]} for row in held_out]
    return own.from_rows(Drawn(config.stop), held_out, encoding=encoding or IdsTokenizer(7))


@pytest.fixture(autouse=True)
def _registered(own_parts):
    register("test_own", OwnConfig, load)
    register("test_mean", MeanConfig, lambda config, logits, targets: logits.mean())


def test_a_run_that_continues_reads_on_from_the_iterator_s_state(experiment):
    def stream(start, state):
        data, meta = load(OwnConfig(), None), Meta(step=start, loss=None, data_state=state)
        setup = SimpleNamespace(experiment=experiment, data=data, strategy=SimpleNamespace(row_shard=(0, 1)))
        return LiveRun(setup, start, meta, checkpoints=None, log=None, progress=None, stop=None).rows

    whole = stream(0, None)
    for t in range(2):
        whole.batch(t)
    continued = stream(2, whole.state())
    np.testing.assert_equal(continued.batch(2), whole.batch(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": OwnConfig(held_out_weight=0.0, batch_size=4)}, "held-out targets must be above 0, got 0"),
        ({"loss": MeanConfig()}, r"the loss must be of the shape \(1, 16\) of the targets, .* got float32"),
    ],
)
def test_what_cannot_be_a_loss_is_refused_before_anything_is_written(
    experiment, tmp_path, console, changes, message
):
    with pytest.raises(UserError, match=message):
        train(dataclasses.replace(experiment, **changes), tmp_path / "run", console)
    assert not (tmp_path / "run").exists()


@pytest.mark.grid
def test_a_loss_that_is_not_in_nats_has_no_perplexity(experiment, tmp_path, console):
    experiment = dataclasses.replace(
        experiment,
        data=OwnConfig(batch_size=4),
        loss=CrossEntropyConfig(label_smoothing=0.1),
        metrics=(TopKAccuracyConfig(2),),
    )
    whole = tmp_path / "whole"
    train(experiment, whole, console)
    found = rows(whole)
    assert {"train/loss", "train/top_2_accuracy"} <= {*found[0]}
    assert "train/perplexity" not in found[0]
    last = found[-1]
    assert 0 < np.log(last["validation/perplexity"]) != last["validation/loss"]
    assert last["validation/top_2_accuracy"] >= last["validation/accuracy"]
    values = evaluated(whole, batch_size=5)
    assert values["tokens"] == 24
    for name in ("loss", "perplexity", "top_2_accuracy"):
        assert values[name] == pytest.approx(last[f"validation/{name}"], rel=1e-6)
    with pytest.raises(UserError, match="path must be left out: 'test_own' has no options path and"):
        evaluated(whole, "somewhere")


@pytest.mark.wide
def test_an_iterator_that_ends_loses_nothing(experiment, tmp_path, console):
    short = dataclasses.replace(experiment, data=OwnConfig(stop=30, batch_size=4))
    message = "ended after 7 batches, before training.steps=12; the steps so far are saved"
    for _ in range(2):  # the second continues, and has nothing to add
        with pytest.raises(UserError, match=message):
            train(short, tmp_path / "run", console)
        assert saved_steps(tmp_path / "run" / "checkpoints")[0] == 7
    train(with_training(short, steps=7), tmp_path / "run", console)
    assert (rows(tmp_path / "run")[-1]["step"], best(tmp_path / "run" / "checkpoints").step) == (7, 7)
    train(with_training(short, steps=7), tmp_path / "run", console)
    assert "already trained to step 7" in console.file.getvalue()
