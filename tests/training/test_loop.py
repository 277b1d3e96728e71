"""Whole runs: the files they write, and that stopping them anywhere changes nothing."""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
from grid import in_grid
from whole_runs import assert_same_run, before_step, contents, fails_before, rows, saved, with_training

from hyena_jax import models
from hyena_jax.config import AFTSimpleConfig, ConstantConfig, Experiment, LanguageModelConfig, TextConfig
from hyena_jax.system.chips import peak_flops
from hyena_jax.system.errors import UserError
from hyena_jax.system.output import Output
from hyena_jax.system.signals import Interrupted, stop_requests
from hyena_jax.system.trees import named_leaves
from hyena_jax.training import hooks
from hyena_jax.training.checkpoint import best, saved_steps
from hyena_jax.training.console import Progress
from hyena_jax.training.folder import read_folder, require_checkpoint_if_logged
from hyena_jax.training.hooks import Diverged
from hyena_jax.training.initial import load_params
from hyena_jax.training.metrics import read_rows
from hyena_jax.training.options import StartOptions
from hyena_jax.training.run import train
from hyena_jax.training.step import FINITE, init_params
from hyena_jax.training.timing import flops_per_unit

pytestmark = pytest.mark.xdist_group("trained")  # its tests share a run


def test_a_run_leaves_everything_it_promises(whole, experiment):
    assert {path.name for path in whole.iterdir()} == {
        ".lock", "config.json", "data.json", "metrics.jsonl", "checkpoints", "learning_curves.png"
    }  # fmt: skip
    found = rows(whole)
    assert [row["step"] for row in found if "train/loss" in row] == [3, 6, 9, 12]
    assert [row["step"] for row in found if "validation/loss" in row] == [4, 8, 12]
    assert {*found[0]} >= {"train/perplexity", "train/grad_norm", "train/param_norm", "train/learning_rate"}
    losses = [row["validation/loss"] for row in found if "validation/loss" in row]
    assert losses[-1] < losses[0] < 5.6
    assert saved_steps(whole / "checkpoints")[0] == 12
    assert best(whole / "checkpoints").loss == min(losses)
    run = read_folder(whole)
    assert run.experiment.model.vocab_size == 256
    assert dataclasses.replace(run.experiment.model, vocab_size=None) == experiment.model


@pytest.mark.parametrize("stop_after", [2, *in_grid(4)])
def test_a_stopped_run_continues_as_if_it_had_not_been(whole, experiment, tmp_path, console, stop_after):
    """After step 4 its evaluation is cut short, and made when it is continued."""
    stopped = tmp_path / "stopped"
    with (
        before_step(stop_after, lambda: signal.raise_signal(signal.SIGTERM)),
        pytest.raises(Interrupted, match=f"stopped by SIGTERM; saved at step {stop_after}"),
    ):
        train(experiment, stopped, console)
    train(experiment, stopped, console)
    assert f"continuing after step {stop_after}" in console.file.getvalue()
    assert_same_run(whole, stopped)


@pytest.mark.grid
def test_checkpoints_by_the_clock_are_replaced_and_change_nothing_else(whole, experiment, tmp_path, console):
    """With a save after every step, of which only the usual ones last."""
    timed = with_training(experiment, checkpoint_minutes=1e-9)
    timed = dataclasses.replace(timed, parallel=dataclasses.replace(experiment.parallel, stop_every=1))
    train(timed, tmp_path / "timed", console)
    assert_same_run(whole, tmp_path / "timed")
    lasting = saved_steps(whole / "checkpoints")
    found = saved_steps(tmp_path / "timed" / "checkpoints")
    assert found == sorted({*lasting, 11}, reverse=True)  # 11: before the last


@pytest.mark.grid
def test_a_run_that_fails_loses_no_step(experiment, tmp_path, console):
    with fails_before(8, OSError("the machine is gone")):
        train(experiment, tmp_path / "run", console)
    assert saved_steps(tmp_path / "run" / "checkpoints") == [7, 5, 4]


@pytest.mark.grid
def test_a_run_whose_output_is_closed_is_saved(experiment, tmp_path, monkeypatch):
    read, write = os.pipe()
    usual = Progress.advance

    def advance(progress, shown):
        usual(progress, shown)
        if shown == 2:  # the row of step 3 is the next to be printed
            os.close(read)

    monkeypatch.setattr(Progress, "advance", advance)
    monkeypatch.setattr("hyena_jax.training.console.ROW_EVERY", 0.0)
    file = open(write, "w")  # noqa: SIM115 (closing it writes what nobody reads)
    with pytest.raises(Interrupted, match="stopped by a closed output; saved at step 3"):
        train(experiment, tmp_path / "run", Output(file=file))
    with pytest.raises(BrokenPipeError):
        file.close()


@pytest.mark.grid
def test_a_run_that_began_from_given_parameters_begins_so_again(whole, experiment, tmp_path, console):
    """Killed before its first checkpoint, it is resumed by itself, and its source is gone meanwhile."""
    given, killed = StartOptions(init_from=whole), tmp_path / "killed"
    train(experiment, tmp_path / "undisturbed", console, given)
    with fails_before(1, OSError("killed")):
        train(experiment, killed, console, given)
    assert saved_steps(killed / "checkpoints") == []
    shutil.rmtree(whole)
    train(experiment, killed, console)
    assert_same_run(tmp_path / "undisturbed", killed)


def test_a_run_whose_checkpoints_are_gone_does_not_start_over(whole, experiment, console):
    shutil.rmtree(whole / "checkpoints")
    before = rows(whole)
    with pytest.raises(UserError, match=r"has logged step 12 but holds no checkpoint: bring its 'checkpoi"):
        train(experiment, whole, console)
    assert rows(whole) == before
    rare = SimpleNamespace(experiment=with_training(experiment, eval_every=1000))
    with pytest.raises(UserError, match="has logged step 12 but holds no checkpoint"):
        require_checkpoint_if_logged(whole, rare)
    (whole / "metrics.jsonl").unlink()
    require_checkpoint_if_logged(whole, rare)


@pytest.mark.grid
def test_a_folder_below_the_text_is_refused(experiment, text, console):
    inside = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, path=str(text.parent)))
    with pytest.raises(UserError, match=r"workdir must be outside of the folder data\.path '.*data"):
        train(inside, text.parent / "runs" / "a", console)
    assert [*text.parent.iterdir()] == [text]


KILLED = """
import os, signal, sys
from pathlib import Path
from rich.console import Console
from whole_runs import before_step
from hyena_jax import config
from hyena_jax.training.run import train
with before_step(8, lambda: os.kill(os.getpid(), signal.SIGKILL)):
    train(config.read(Path(sys.argv[1])), Path(sys.argv[2]), Console())
"""


@pytest.mark.wide
def test_a_killed_run_loses_at_most_the_steps_since_its_checkpoint(whole, experiment, tmp_path, console):
    command = [sys.executable, "-c", KILLED, str(whole / "config.json"), str(tmp_path / "killed")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    train(experiment, tmp_path / "killed", console)
    assert_same_run(whole, tmp_path / "killed")


@pytest.mark.grid
def test_a_diverging_run_stops_and_keeps_good_checkpoints(experiment, tmp_path, console):
    schedule = ConstantConfig(warmup_steps=3)
    wild = dataclasses.replace(experiment.optimizer, learning_rate=1e30, schedule=schedule, clip_norm=None)
    wild = dataclasses.replace(experiment, optimizer=wild)
    with pytest.raises(Diverged, match=r"finite.*step \d+.*optimizer.learning_rate"):
        train(with_training(wild, checkpoint_every=1, log_every=1), tmp_path / "wild", console)
    chex.assert_tree_all_finite(saved(tmp_path / "wild")[2])


def test_another_experiment_or_text_is_refused_and_nothing_changes(whole, experiment, text, console):
    before = contents(whole)
    changed = dataclasses.replace(experiment, seed=5, data=dataclasses.replace(experiment.data, batch_size=8))
    with pytest.raises(UserError, match=r"different experiment: data.batch_size: 4 -> 8; seed: 0 -> 5"):
        train(changed, whole, console)
    text.write_text(text.read_text().replace("beer", "milk"))
    with pytest.raises(UserError, match="the text changed"):
        train(experiment, whole, console)
    assert contents(whole) == before


@pytest.mark.parametrize("name", [".", "thesis.tex"])
def test_a_folder_of_something_else_is_refused(experiment, tmp_path, console, name):
    precious = tmp_path / "mine" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("precious")
    with pytest.raises(UserError, match="workdir must be"):
        train(experiment, precious.parent / name, console)
    assert precious.read_text() == "precious"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"devices": 3}}, "data.batch_size must be a multiple"),
        ({"model": {"vocab_size": 99}}, "model.vocab_size must be"),
        ({"data": {"path": "nowhere.txt"}}, "nowhere.txt"),
        (
            {"logging": {"sample_prompt": "ß"}, "data": {"tokenizer": "characters"}},
            "logging.sample_prompt 'ß'",
        ),
        ({"training": {"until": "acuracy=0.9"}}, "'acuracy' is unknown .did you mean 'accuracy'"),
    ],
)
def test_wrong_input_is_refused_before_the_folder_exists(experiment, tmp_path, console, changes, message):
    parts = {name: dataclasses.replace(getattr(experiment, name), **to) for name, to in changes.items()}
    with pytest.raises(UserError, match=message):
        train(dataclasses.replace(experiment, **parts), tmp_path / "run", console)
    assert not (tmp_path / "run").exists()


@pytest.mark.grid
def test_a_run_says_what_its_time_went_into(experiment, tmp_path, console, monkeypatch):
    """The first step took the compiler's time, also of what rows compute, and has no speed."""
    compiled = []

    class Watched(hooks.Clock):
        def begin(self, step):
            compiled.append(hooks.param_norm._cache_size())
            super().begin(step)

    hooks.param_norm.clear_cache()
    monkeypatch.setattr(hooks, "Clock", Watched)
    monkeypatch.setattr(hooks, "COUNT_AFTER", 0.0)
    monkeypatch.setattr(hooks, "peak_flops", lambda kind: 1e12)
    train(with_training(experiment, steps=4, log_every=1, eval_every=2), tmp_path / "run", console)
    assert compiled == [1] == [hooks.param_norm._cache_size()]
    first, *later = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row]
    speeds = {"train/tokens_per_second", "train/data_wait", "goodput/mfu", "goodput/model_flops_per_second"}
    assert not speeds & {*first}
    for row in later:
        speed = row["goodput/device_tokens_per_second"] * len(jax.devices()[: experiment.parallel.devices])
        assert speed == pytest.approx(row["train/tokens_per_second"])
        assert row["goodput/model_flops_per_second"] > speed * 6 * 1000
        assert row["goodput/mfu"] > 0
        assert 0 <= row["train/data_wait"] < 1
        assert 0 <= sum(row[f"goodput/{part}"] for part in ("data_wait", "evaluating", "saving")) <= 1
    assert later[-1]["goodput/evaluating"] > 0
    assert " 0 tokens/s" not in console.file.getvalue()
    line = next(line for line in console.file.getvalue().splitlines() if line.startswith("time "))
    for part in ("% training", "% evaluating", "% saving", "tokens/s a device", "MFU"):
        assert part in line


def test_model_flops_are_six_for_each_entry_of_a_kernel_and_token():
    """Of a model without products along the sequence; the tied head is the embedding's table."""
    model = LanguageModelConfig(
        pattern=(AFTSimpleConfig(),), n_layers=2, d_model=8, d_ff=16, max_len=32, vocab_size=11
    )
    experiment = Experiment(model=model, data=TextConfig(seq_len=16, batch_size=2))
    params = jax.eval_shape(lambda: init_params(models.build(model), 0))
    sizes = {path: leaf.size for path, leaf in named_leaves(params).items()}
    entries = sum(size for path, size in sizes.items() if path.endswith(("kernel", "embedding")))
    assert flops_per_unit(experiment, 16) == pytest.approx(6 * entries, rel=0.01)
    lora = dataclasses.replace(model, lora=dataclasses.replace(model.lora, rank=2))
    assert flops_per_unit(dataclasses.replace(experiment, model=lora), 16) == 0


def test_the_peak_of_a_device_is_known_by_its_kind():
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("cpu") is None


@pytest.mark.grid
@pytest.mark.parametrize(
    ("options", "folders"),
    [
        ({"profile_at": (2, 5, 13)}, {"step_2", "step_13"}),  # 5 is within the first
        ({"profile_every": 11}, {"step_11", "step_22"}),
        ({}, {"plugins"}),
    ],
)
def test_profiles_are_written_where_asked(experiment, tmp_path, console, options, folders):
    asked = StartOptions(tmp_path / "profile", **options)
    train(with_training(experiment, steps=26), tmp_path / "run", console, asked)
    found = [*(tmp_path / "profile").iterdir()]
    assert {path.name for path in found} == folders
    assert all(list(path.rglob("*.xplane.pb")) for path in found)


def test_a_profile_needs_a_folder(experiment, tmp_path, console):
    with pytest.raises(UserError, match="profile_every must be at least 11, got 0"):
        StartOptions(tmp_path, profile_every=0)
    with pytest.raises(UserError, match="profile_every must be absent without profile, got 11"):
        train(experiment, tmp_path / "run", console, StartOptions(profile_every=11))


def test_a_second_signal_acts_as_usual():
    with pytest.raises(KeyboardInterrupt), stop_requests() as request:
        request.defer()
        signal.raise_signal(signal.SIGINT)
        assert request.name == "SIGINT"
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # nothing else may call it
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_parameters_of_any_saved_step_can_be_read(whole, console):
    run = read_folder(whole)
    model = models.build(run.experiment.model)
    steps = saved_steps(whole / "checkpoints")
    assert load_params(run, model, str(steps[-1]), print)[0] == steps[-1]
    assert load_params(run, model, "best", print)[0] == best(whole / "checkpoints").step
    for wrong in ("77", "newest", "-1"):
        with pytest.raises(UserError, match="step must be"):
            load_params(run, model, wrong, print)
    with pytest.raises(UserError, match="holds no run"):
        read_folder(whole / "checkpoints")


def test_a_checkpoint_by_the_clock_is_overdue_after_its_minutes(experiment, monkeypatch):
    monkeypatch.setattr(hooks, "time", SimpleNamespace(monotonic=lambda: 1000.0))

    def is_overdue(saved_at, minutes=10):
        training = dataclasses.replace(experiment.training, checkpoint_minutes=minutes)
        run = SimpleNamespace(
            setup=SimpleNamespace(experiment=dataclasses.replace(experiment, training=training)),
            stop=SimpleNamespace(name=None),
            progress=SimpleNamespace(is_unread=False),
            save=SimpleNamespace(saved_at=saved_at),
        )
        now = hooks.Now(experiment.parallel.stop_every, None, {}, is_last=False)
        hooks.Agree(run)(now)
        return now.is_overdue

    assert [is_overdue(400), is_overdue(401), is_overdue(0, minutes=None)] == [True, False, False]


def run_of_hooks(experiment, **parts):
    """What a hook needs of a run; anything else that it touches is an error."""
    setup = SimpleNamespace(experiment=experiment, measured_on="rows", data=None, strategy=None)
    parts = {"checkpoints": SimpleNamespace(best_loss=lambda measured_on: np.inf), **parts}
    return SimpleNamespace(setup=setup, start=0, clock=hooks.Clock(1), **parts)


def test_what_is_not_finite_is_neither_logged_nor_saved(experiment):
    bad_step = "the loss or a gradient was not finite at step 2; nothing was saved"
    metrics = {"loss": np.float32(1), "bad_step": np.int32(2)}
    run = run_of_hooks(experiment)
    with pytest.raises(Diverged, match=bad_step):
        hooks.Log(run)(hooks.Now(3, None, metrics, is_last=True))
    for last, step, message in (
        (np.inf, FINITE, "the parameters' norm is not finite after step 3; nothing was saved"),
        (1, 2, bad_step),
    ):
        state = SimpleNamespace(params={"w": np.float32([1, last])}, bad_step=np.int32(step))
        with pytest.raises(Diverged, match=message):
            hooks.Save(run)(hooks.Now(3, state, {}, is_last=True))


def evaluate(experiment, monkeypatch, sum_held_out, **parts):
    """The hook that evaluates, after the third step, where `sum_held_out` stands for reading the rows."""
    monkeypatch.setattr(hooks, "mapped_eval_step", lambda setup: None)
    monkeypatch.setattr(hooks, "sum_held_out", sum_held_out)
    run = run_of_hooks(experiment, progress=SimpleNamespace(evaluating=contextlib.nullcontext), **parts)
    hooks.Evaluate(run)(hooks.Now(3, SimpleNamespace(model_params=None), {}, is_last=True))


def test_a_validation_loss_that_is_not_finite_ends_the_run(experiment, monkeypatch):
    monkeypatch.setattr(hooks, "held_out_values", lambda *_: {"loss": np.nan})
    with pytest.raises(Diverged, match="the validation loss at step 3 is nan; nothing was saved"):
        evaluate(experiment, monkeypatch, lambda *_: None)


def test_an_evaluation_that_fails_keeps_the_steps_so_far(experiment, monkeypatch):
    def fail(*_):
        raise OSError("a disk is gone")

    kept = []
    save = SimpleNamespace(saved=2, write=lambda now: kept.append((now.step, now.unevaluated)))
    with pytest.raises(OSError, match="a disk is gone"):
        evaluate(experiment, monkeypatch, fail, save=save)
    assert kept == [(3, True)]


def test_a_checkpoint_says_that_its_evaluation_was_cut_short(experiment):
    """The next start makes it first."""
    kept = []
    run = run_of_hooks(experiment, log=SimpleNamespace(sync=lambda: None), rows=None)
    run.checkpoints.save = lambda meta, items, **_: kept.append(meta)
    run.setup.strategy = SimpleNamespace(to_global=lambda state: SimpleNamespace(to_items=dict))
    state = SimpleNamespace(params={"w": np.float32([1])}, bad_step=np.int32(FINITE), base=None)
    hooks.Save(run)(hooks.Now(3, state, {}, is_last=True, unevaluated=True))
    assert [(meta.step, meta.unevaluated) for meta in kept] == [(3, True)]
