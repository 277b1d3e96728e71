"""Faults in whole runs in this process; `-m faults` tests processes, as experiments/faults/run.py does."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import contents, with_training

from hyena_jax import cli
from hyena_jax.system.errors import UserError
from hyena_jax.system.signals import Interrupted, stop_requests
from hyena_jax.training import run as training
from hyena_jax.training import setup
from hyena_jax.training.checkpoint import saved_steps
from hyena_jax.training.folder import BASE, DESCRIPTION, locked, read_folder
from hyena_jax.training.options import StartOptions
from hyena_jax.training.run import train

pytestmark = pytest.mark.xdist_group("trained")  # it shares a run with `test_loop`

PROGRAM = Path(__file__).parents[2] / "experiments" / "faults" / "run.py"


def test_a_second_training_changes_nothing(whole, experiment, console):
    before = contents(whole)
    with locked(whole), pytest.raises(UserError, match="in use: another process trains there"):
        train(with_training(experiment, steps=14, log_every=1), whole, console)
    assert contents(whole) == before


@pytest.mark.faults
def test_a_changed_text_is_continued_when_that_is_accepted(experiment, text, tmp_path, console):
    """Also if the text has other symbols, since the run's tokenizer reads it."""
    letters = dataclasses.replace(
        experiment, data=dataclasses.replace(experiment.data, tokenizer="characters")
    )
    run = tmp_path / "run"
    train(letters, run, console)
    encoding, before = read_folder(run).encoding.to_json(), contents(run)
    text.write_text(text.read_text().replace("wall", "hall"))
    with pytest.raises(UserError, match="fingerprint differs; --accept-changed-data"):
        train(with_training(letters, steps=14), run, console)
    assert contents(run) == before
    train(with_training(letters, steps=14), run, console, StartOptions(accept_changed_data=True))
    output = " ".join(console.file.getvalue().split())
    assert "changed since the last start: text: fingerprint" in output
    assert "continuing after step 12" in output
    assert read_folder(run).encoding.to_json() == encoding
    train(with_training(letters, steps=15), run, console)
    text.write_text(text.read_text() + "ß" * 100)
    with pytest.raises(UserError, match="the text changed since"):
        train(with_training(letters, steps=16), run, console)
    with pytest.raises(UserError, match="ß"):
        train(with_training(letters, steps=16), run, console, StartOptions(accept_changed_data=True))


@pytest.mark.wide
def test_what_a_kill_leaves_of_a_new_folder_is_continued(experiment, tmp_path, console):
    """It is not a run yet: the next start may be another, from other parameters."""
    workdir = tmp_path / "run"
    workdir.mkdir()
    for name in (".lock", "data.json", BASE, DESCRIPTION, f".{'0' * 16}.draft"):
        (workdir / name).write_text("{")
    train(with_training(experiment, steps=1), workdir, console)
    assert saved_steps(workdir / "checkpoints") == [1]
    assert not (workdir / BASE).exists()


@pytest.mark.wide
def test_a_damaged_latest_checkpoint_and_a_half_deleted_one_cost_only_their_steps(whole, experiment, console):
    latest, *_, oldest = (whole / "checkpoints" / str(step) for step in saved_steps(whole / "checkpoints"))
    for path in (latest / "params").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    for path in [oldest / "manifest.json", oldest / "_CHECKPOINT_METADATA"]:
        path.unlink()
    shutil.rmtree(oldest / "params")
    train(with_training(experiment, steps=14), whole, console)
    assert "checkpoint 12 is damaged: set aside" in console.file.getvalue()
    assert saved_steps(whole / "checkpoints")[0] == 14


def test_a_signal_acts_as_usual_until_a_step_was_trained(experiment, tmp_path, console, monkeypatch):
    usual = setup.init_params

    def init_params(model, seed):
        signal.raise_signal(signal.SIGINT)
        return usual(model, seed)

    monkeypatch.setattr(setup, "init_params", init_params)
    with pytest.raises(KeyboardInterrupt) as raised:
        train(experiment, tmp_path / "run", console)
    assert not isinstance(raised.value, Interrupted)
    assert not (tmp_path / "run").exists()


def test_a_signal_that_is_repeated_does_not_break_the_save():
    with stop_requests() as request:
        request.defer()
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
    assert request.name == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Interrupted("stopped by SIGTERM and saved"), 75, "stopped by SIGTERM and saved"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(), 3, "nobody reads the output"),
        (MemoryError(), 3, "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"), 3, "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: a.pb; No space left on device"), 3, "the disk is full"),
    ],
)
def test_each_end_has_its_exit_code(error, code, message, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(training, "train", fail)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # a broken pipe takes it away
    assert cli.main(["train", "quickstart", "--workdir", str(tmp_path)]) == code
    assert message in capsys.readouterr().err


@pytest.mark.grid
@pytest.mark.faults
def test_the_program_finds_nothing(tmp_path):
    """One of each fault that no other test tries: within a write, on a full disk, of several processes."""
    faults = ["inside a checkpoint write", "commit and", "SIGTERM twice", "disk full", "cannot be written"]
    faults += ["read-only", "started at once", "trains already"]
    arguments = ["--each", 1, "--workdir", tmp_path / "runs", "--only", *faults]
    done = subprocess.run([sys.executable, PROGRAM, *map(str, arguments)], check=False)
    assert done.returncode == 0


def test_a_pipe_among_the_checkpoints_is_refused(whole, experiment, console):
    """Orbax would wait for somebody to write into it."""
    os.mkfifo(whole / "checkpoints" / "15.orbax-checkpoint-tmp")
    before = sorted(whole.rglob("*"))
    with pytest.raises(UserError, match="is a pipe: remove it"):
        train(with_training(experiment, steps=14), whole, console)
    assert sorted(whole.rglob("*")) == before
