"""Sweeps: what is planned, trained, continued, reported and refused."""

import contextlib
import dataclasses
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from grid import in_grid

import hyena_jax
from hyena_jax import cli, config
from hyena_jax.config import (
    AttentionConfig,
    ConstantConfig,
    Experiment,
    LanguageModelConfig,
    LoggingConfig,
    LoRAConfig,
    ParallelConfig,
    SGDConfig,
    TrainingConfig,
)
from hyena_jax.sweeps import pool, serve
from hyena_jax.sweeps.pool import Event, RunRequest, ThisMachine, _divided_cores
from hyena_jax.sweeps.serve import Server, _options
from hyena_jax.sweeps.sweep import KEPT, Outcome, _continued, _ended, _named
from hyena_jax.system.errors import UserError
from hyena_jax.tasks.arithmetic import MajorityConfig
from hyena_jax.training.metrics import read_rows

pytestmark = pytest.mark.xdist_group("sweep")  # its tests share four runs

SMALL = Experiment(
    model=LanguageModelConfig(pattern=(AttentionConfig(1),), n_layers=1, d_model=4, d_ff=4, max_len=8),
    data=MajorityConfig(seq_len=8, test_rows=16, batch_size=4),
    optimizer=SGDConfig(learning_rate=1e-2, schedule=ConstantConfig(warmup_steps=0), clip_norm=None),
    training=TrainingConfig(steps=6, eval_every=2, checkpoint_every=3, log_every=3),
    parallel=ParallelConfig(devices=1),
    logging=LoggingConfig(tensorboard=False),
)


def diverging(experiment):
    return dataclasses.replace(
        experiment, optimizer=dataclasses.replace(experiment.optimizer, learning_rate=1e38)
    )


def until(experiment, target):
    return dataclasses.replace(experiment, training=dataclasses.replace(experiment.training, until=target))


def test_the_seconds_of_all_starts_are_added(tmp_path):
    event = Event("seed=0", "failed", 2.5, {"error": "killed"})
    assert _ended(Outcome(tmp_path, SMALL, seconds=1.5), event).seconds == 4


def test_a_run_that_another_worker_continues_took_the_seconds_of_both(monkeypatch):
    worker = Mock(work=None, ask=lambda name, _: setattr(worker, "work", name))
    events = [Event("a", pool.STOPPED, 2.0, {}), Event("a", "done", 3.0, {})]

    def event(*_):
        worker.work = None
        return events.pop(0)

    monkeypatch.setattr(pool, "wait", lambda workers, _: [*workers])
    monkeypatch.setattr(pool.Pool, "_event", event)
    workers = pool.Pool([], [])
    workers._workers = {"connection": worker}
    assert list(workers.run([("a", None)], [])) == [Event("a", "done", 5.0, {})]


class Telling:
    """An engine whose workers say what it is told."""

    n_workers = 1

    def __init__(self, events):
        self.events = events

    def pool(self, n_runs, lock):
        return contextlib.nullcontext(self)

    def run(self, requests, asked):
        return [] if requests[0][1].kind == "plan" else self.events


def test_a_run_that_has_diverged_stays_so_when_another_worker_continues_its_group(tmp_path):
    runs = {f"seed={seed}": dataclasses.replace(SMALL, seed=seed) for seed in (0, 1)}
    first, second = runs
    events = [
        Event(first, "diverged", 1.0, {"run": first, "error": "the loss is not finite"}),
        Event(first, "step", 1.0, {"run": first, "step": 2}),
        Event(second, "step", 1.0, {"run": second, "step": 4}),
        Event(first, "diverged", 2.0, {"run": first, "error": "the loss is not finite"}),
        Event(first, "stopped", 2.0, {}),  # the worker, with all runs that have not ended
    ]
    outcomes = hyena_jax.sweep(runs, tmp_path, engine=Telling(events), together=("seed",), quiet=True)
    ended = [(outcome.status, outcome.seconds) for outcome in outcomes.values()]
    assert ended == [("diverged", 1.0), ("waiting", 2.0)]


def test_a_path_that_begins_like_a_url_is_refused():
    with pytest.raises(UserError, match="workdir must be a folder on this machine, got 'gs:/bucket/sweep'"):
        hyena_jax.sweep({"a": SMALL}, Path("gs://bucket") / "sweep", quiet=True)


def test_a_copy_below_a_folder_with_a_blank_is_named_by_its_url():
    assert _named(Path("/my tmp/hyena_jax_copy_a1/gs:/bucket/sweep/a")) == "gs://bucket/sweep/a"
    assert _named(Path("/my runs/a")) == "/my runs/a"


def held_out(workdir):
    return [
        {name: value for name, value in row.items() if name.startswith(("step", "validation"))}
        for row in read_rows(workdir / "metrics.jsonl")
        if "validation/loss" in row
    ]


class Here:
    """An engine that trains the runs in this process, where JAX has started already."""

    n_workers = 1

    @contextlib.contextmanager
    def pool(self, n_runs, lock):
        self.sent = []
        self.server = Server(lambda kind, **values: self.sent.append((kind, values)))
        yield self

    def run(self, work, asked):
        for name, request in work:
            with open(f"{request.workdir}.log", "a") as log, contextlib.redirect_stdout(log):
                self.server.serve(request)
            while self.sent:
                kind, values = self.sent.pop(0)
                yield Event(values.get("run", name), kind, 0.1, values)


@pytest.fixture(scope="module")
def swept(tmp_path_factory, compiled_once):
    """A sweep of four runs: two end, one reaches its target at once, one diverges."""
    root = tmp_path_factory.mktemp("sweeps") / "a"
    runs = {
        "seed=0": SMALL,
        "seed=1": dataclasses.replace(SMALL, seed=1),
        "early": until(SMALL, "loss=100"),
        "wild": diverging(SMALL),
    }
    with contextlib.redirect_stdout(io.StringIO()) as output, pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "_print_to", lambda log: None)
        outcomes = hyena_jax.sweep(runs, root, engine=Here())
    (root.parent / "output.txt").write_text(output.getvalue())
    return root, runs, outcomes


def test_every_run_is_reported(swept):
    root, runs, outcomes = swept
    assert [(name, outcome.status, outcome.step) for name, outcome in outcomes.items()] == [
        ("seed=0", "done", 6),
        ("seed=1", "done", 6),
        ("early", "done", 2),
        ("wild", "diverged", 0),
    ]
    assert "try a lower optimizer.learning_rate" in outcomes["wild"].error.lower()
    assert outcomes["seed=0"].values["loss"] != outcomes["seed=1"].values["loss"]
    assert held_out(root / "early") == held_out(root / "seed=0")[:1]  # whatever the worker trained between
    assert all(outcome.planned > 0 for outcome in outcomes.values())
    assert "step      6   validation loss" in (root / "seed=0.log").read_text()
    assert {path.name for path in root.iterdir()} == {
        ".lock", "sweep.json", *runs, *(f"{name}.log" for name in runs)
    }  # fmt: skip


def test_the_planned_time_is_printed_first_and_then_a_line_for_each_run(swept):
    root, runs, _ = swept
    first, *lines = (root.parent / "output.txt").read_text().splitlines()
    assert first.startswith("4 runs to train; 24 steps; planned time 0:0")
    names = [line.split("   ")[0] for line in lines]
    assert names == [f"{i}/4  {name}" for i, name in enumerate(runs, start=1)]
    assert " left" in lines[0]
    assert " left" not in lines[3]
    assert "accuracy" in lines[0]
    assert "diverged: " in lines[3]


@pytest.mark.wide
def test_runs_are_those_of_a_single_training(swept, tmp_path):
    root, runs, _ = swept
    hyena_jax.train(runs["seed=1"], tmp_path / "alone", quiet=True)
    assert held_out(root / "seed=1") == held_out(tmp_path / "alone")
    assert hyena_jax.load_run(root / "seed=1", quiet=True).step == 6


TOGETHER = ("seed", "optimizer.learning_rate")


@pytest.fixture(scope="module")
def trained_together(swept, tmp_path_factory):
    """The same sweep, of which `early` alone is not trained together with the others."""
    _, runs, _ = swept
    root = tmp_path_factory.mktemp("together") / "a"
    return root, hyena_jax.sweep(runs, root, together=TOGETHER, quiet=True)


def assert_alike(a, b):
    """Two run folders: equal files, and held-out values that differ by rounding."""
    names = [sorted(str(path.relative_to(root)) for path in root.rglob("*.json*")) for root in (a, b)]
    assert names[0] == names[1]
    for ours, theirs in zip(held_out(a), held_out(b), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.wide
def test_runs_together_are_those_alone_and_one_that_diverges_does_not_stop_the_others(
    swept, trained_together
):
    (root, _, outcomes), (theirs, found) = swept, trained_together
    assert [(o.status, o.step, o.error) for o in found.values()] == [
        (o.status, o.step, o.error) for o in outcomes.values()
    ]
    for name in ("seed=0", "seed=1", "early"):
        assert_alike(theirs / name, root / name)
        assert hyena_jax.load_run(theirs / name, quiet=True).step == outcomes[name].step
    assert "step      6   validation loss" in (theirs / "seed=1.log").read_text()
    assert "validation loss" not in (theirs / "wild.log").read_text()


@pytest.mark.grid
def test_runs_together_continue_from_the_steps_where_each_was_killed(swept, trained_together, tmp_path):
    root = shutil.copytree(trained_together[0], tmp_path / "killed")
    shutil.rmtree(root / "seed=1" / "checkpoints" / "6")
    shutil.rmtree(root / "seed=0")
    kept = json.loads((root / "sweep.json").read_text())["runs"]
    for name in ("seed=0", "seed=1"):
        kept[name]["status"] = "waiting"
    (root / "sweep.json").write_text(json.dumps({"runs": kept}))
    found = hyena_jax.sweep(swept[1], root, together=TOGETHER, quiet=True)
    assert [outcome.status for outcome in found.values()] == ["done", "done", "done", "diverged"]
    for name in ("seed=0", "seed=1"):
        assert_alike(root / name, swept[0] / name)
    assert "continuing after step" in (root / "seed=1.log").read_text()


@pytest.mark.parametrize(
    ("field", "must"),
    [
        ("data.seq_len", "of `seed` and fields of the optimizer"),
        ("optimizer.accumulation_steps", "of `seed` and fields of the optimizer"),
        ("optimizer.learning_rat", "of fields of the runs"),
    ],
)
def test_what_cannot_be_trained_together_is_refused(field, must, tmp_path):
    with pytest.raises(UserError, match=f"together must be {must}.*, got '{field}'"):
        hyena_jax.sweep({"a": SMALL}, tmp_path / "new", together=[field], quiet=True)
    assert not (tmp_path / "new").exists()


def test_a_sweep_that_is_done_starts_nothing(swept, monkeypatch):
    root, runs, outcomes = swept
    monkeypatch.setattr(subprocess, "Popen", None)
    assert hyena_jax.sweep(runs, root, quiet=True) == outcomes


HARMS = {
    "no folder": shutil.rmtree,
    "no checkpoints": lambda run: shutil.rmtree(run / "checkpoints"),
    "an earlier checkpoint": lambda run: (run / "checkpoints" / "6").rename(run / "checkpoints" / "3"),
    "damaged rows": lambda run: (run / "metrics.jsonl").write_text("damaged"),
    "no rows": lambda run: (run / "metrics.jsonl").unlink(),
    "damaged data": lambda run: os.truncate(run / "data.json", 9),
    "another config": lambda run: shutil.copy(run.parent / "seed=0" / "config.json", run),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_run_whose_folder_was_harmed_is_trained_again(swept, tmp_path, harm):
    root, runs, outcomes = swept
    shutil.copytree(root / "seed=0", tmp_path / "seed=0")
    run = shutil.copytree(root / "seed=1", tmp_path / "seed=1")
    kept = json.loads((root / "sweep.json").read_text())["runs"]["seed=1"]
    fresh = Outcome(run, runs["seed=1"])
    assert _continued(fresh, kept) == dataclasses.replace(outcomes["seed=1"], workdir=run)
    harm(run)
    assert _continued(fresh, kept).status == "waiting"


def test_a_run_that_ends_without_an_evaluation_has_failed(tmp_path):
    """Its last step was trained before, so that it is not evaluated again."""
    ended = _ended(Outcome(tmp_path / "seed=1", SMALL), Event("seed=1", "done", 1.0, {}))
    assert ended.status == "failed"
    assert ended.error.startswith(f"{tmp_path / 'seed=1' / 'metrics.jsonl'} holds no evaluation; remove that")


ENDED = {"config": config.encode(SMALL), **dict.fromkeys(KEPT), "step": 1, "seconds": 1.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [("seconds", math.nan), ("seconds", 1e308), ("planned", math.inf), ("planned", -1.0), ("step", 10**400)],
)
def test_numbers_that_no_sweep_writes_are_refused(tmp_path, name, value):
    with pytest.raises(TypeError, match=f"^{name} of seed=0 is "):
        _continued(Outcome(tmp_path / "seed=0", SMALL), {**ENDED, "status": "done", name: value})


def test_a_run_that_diverged_is_trained_again_with_other_steps(tmp_path):
    kept = {**ENDED, "status": "diverged", "error": "infinite"}
    more = dataclasses.replace(SMALL, training=dataclasses.replace(SMALL.training, steps=99))
    (tmp_path / "a").mkdir()
    found = [_continued(Outcome(tmp_path / "a", run), kept).status for run in (SMALL, more)]
    assert found == ["diverged", "waiting"]


def test_the_exit_code_says_that_a_run_diverged(tmp_path, monkeypatch, capsys):
    def sweep(runs, root, **_):
        return {name: Outcome(root / name, SMALL, status="diverged") for name in runs}

    monkeypatch.setattr(sys.modules["hyena_jax.sweeps.sweep"], "sweep", sweep)
    assert cli.main(["sweep", "quickstart", "--grid", "seed=0,1", "--workdir", str(tmp_path)]) == 1
    assert "2 of 2 runs failed or diverged: seed=0, seed=1" in capsys.readouterr().err


def test_files_that_are_not_a_sweep_s_are_refused(swept, tmp_path):
    root, runs, _ = swept
    copied = shutil.copytree(root, tmp_path / "sweep")
    kept = json.loads((copied / "sweep.json").read_text())
    kept["runs"]["seed=0"]["planned"] = "soon"
    del kept["sha256"]  # as its message tells whoever has changed it by hand
    (copied / "sweep.json").write_text(json.dumps(kept))
    with pytest.raises(UserError, match="is not the file of a sweep: .*planned of seed=0 is 'soon'"):
        hyena_jax.sweep(runs, copied, quiet=True)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "seed=0.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="the log of a run must be a file, and not a link or a pipe"):
        hyena_jax.sweep(runs, tmp_path / "new", quiet=True)
    assert not (tmp_path / "elsewhere").exists()


def test_an_engine_knows_its_own_number_of_jobs(tmp_path):
    with pytest.raises(UserError, match="jobs must be 1 with an engine, which has its own, got 2"):
        hyena_jax.sweep({"seed=0": SMALL}, tmp_path / "new", jobs=2, engine=ThisMachine(), quiet=True)


def test_another_sweep_is_refused(swept, tmp_path):
    root, runs, _ = swept
    before = (root / "sweep.json").read_bytes()
    changed = "another sweep: seed=0: optimizer.learning_rate: 0.01 -> 1e.38"
    for others, message in (
        ({"seed=0": SMALL}, "its run 'seed=1' is not among these"),
        ({**runs, "seed=0": diverging(SMALL)}, changed),
    ):
        with pytest.raises(UserError, match=message):
            hyena_jax.sweep(others, root, quiet=True)
    assert (root / "sweep.json").read_bytes() == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="it holds 'notes.txt'"):
        hyena_jax.sweep({"seed=0": SMALL}, tmp_path, quiet=True)
    with pytest.raises(UserError, match="workdir must be a folder"):
        hyena_jax.sweep({"seed=0": SMALL}, tmp_path / "notes.txt", quiet=True)
    for name in ("a/b", "..", ".hidden", "sweep.json", "a.log", "x" * 201):
        with pytest.raises(UserError, match="name must be a folder's name"):
            hyena_jax.sweep({name: SMALL}, tmp_path / "new", quiet=True)
    assert not (tmp_path / "new").exists()


def test_a_worker_starts_a_run_from_the_parameters_of_its_request(tmp_path):
    request = RunRequest("train", {}, str(tmp_path / "a"), str(tmp_path / "base"))
    assert _options(request).init_from == tmp_path / "base"
    assert _options(request._replace(init_from=None)).init_from is None


@pytest.mark.grid
def test_runs_start_from_given_parameters(swept, tmp_path):
    """An adaptation of a run, and one that trains all of its parameters."""
    base = swept[0] / "seed=0"
    adapted = dataclasses.replace(SMALL.model, lora=LoRAConfig(rank=1))
    runs = {"rank=1": dataclasses.replace(SMALL, model=adapted), "all": SMALL}
    outcomes = hyena_jax.sweep(runs, tmp_path / "tuned", init_from=base, quiet=True)
    assert {outcome.status for outcome in outcomes.values()} == {"done"}
    assert all(outcome.planned > 0 for outcome in outcomes.values())
    for name in runs:
        hyena_jax.train(runs[name], tmp_path / name, init_from=base, quiet=True)
        assert held_out(tmp_path / "tuned" / name) == held_out(tmp_path / name)
    assert hyena_jax.sweep(runs, tmp_path / "tuned", init_from=base, quiet=True) == outcomes
    with pytest.raises(UserError, match="init_from must be '.*seed=0', as when rank=1 was first planned"):
        hyena_jax.sweep(runs, tmp_path / "tuned", quiet=True)


def test_cores_are_divided(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 3, 5, 6}, raising=False)
    assert _divided_cores(1) == [""]
    assert _divided_cores(2) == ["0,2", "3,5"]
    with pytest.raises(UserError, match="jobs must be in 1..5"):
        _divided_cores(6)


COMMAND = [
    *("sweep", "tasks:majority", "--grid", "seed=0,1", "--model.d-model", "4", "--training.eval-every", "10"),
    *("--data.seq-len", "8", "--model.max-len", "8", "--data.test-rows", "16", "--data.batch-size", "4"),
    *("--training.checkpoint-every", "10", "--no-logging.tensorboard", "--training.log-every", "5"),
    *("--model.n-layers", "1", "--model.pattern", "attention", "--model.pattern.0.n-heads", "1"),
]


def started(command, run):
    """The command in a process of its own, which has evaluated `run`."""
    command, pipes = [sys.executable, "-m", "hyena_jax", *command], dict.fromkeys(("stdout", "stderr"), -1)
    process = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, text=True, **pipes)
    while not held_out(run):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    return process


@pytest.mark.faults
def test_a_killed_sweep_continues_and_a_killed_worker_is_replaced(tmp_path):
    """The sweep is killed while it trains; continued, a worker of it is killed; continued again, it ends."""
    command = [*COMMAND, "--training.steps", "60", "--workdir", str(tmp_path / "sweep")]
    whole = tmp_path / "whole"
    assert cli.main([*command[:-1], str(whole)]) == 0
    first = started(command, tmp_path / "sweep" / "seed=0")
    worker = _child(first)
    first.kill()
    first.communicate()
    _wait_for_end(worker)
    second = started(command, tmp_path / "sweep" / "seed=1")
    os.kill(_child(second), signal.SIGKILL)
    _, errors = second.communicate(timeout=100)
    assert (second.returncode, errors) == (1, "hyena-jax: error: 1 of 2 runs failed or diverged: seed=1\n")
    kept = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["runs"]
    assert [run["status"] for run in kept.values()] == ["done", "failed"]
    assert kept["seed=1"]["error"] == "its process was ended by SIGKILL; seed=1.log may say why"
    assert cli.main(command) == 0
    for name in ("seed=0", "seed=1"):
        assert held_out(tmp_path / "sweep" / name) == held_out(whole / name)


def _child(process):
    """The worker of a sweep."""
    while True:
        found = subprocess.run(
            ["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True
        ).stdout.split()
        if found:
            return int(found[0])
        assert process.poll() is None


def _wait_for_end(pid):
    """Waits until a process that is not our child has ended."""
    status = Path(f"/proc/{pid}/status")
    while status.exists() and "zombie" not in status.read_text():
        time.sleep(0.01)


@pytest.mark.faults
@pytest.mark.parametrize("together", [*in_grid(()), ("--together", "seed")], ids=["alone", "together"])
def test_a_sweep_that_is_asked_to_stop_saves(together, tmp_path):
    command = [*COMMAND, "--training.steps", "100000", "--workdir", str(tmp_path / "sweep"), *together]
    process = started(command, tmp_path / "sweep" / "seed=0")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 75
    assert errors == "hyena-jax: stopped by SIGINT; 0 of 2 runs are done. Rerun the command to continue.\n"
    assert (tmp_path / "sweep" / "seed=0" / "checkpoints").is_dir()
    assert (tmp_path / "sweep" / "seed=1" / "checkpoints").is_dir() == bool(together)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--grid seed", "--grid must be FIELD=VALUE"),
        ("--grid seed=0 --jobs 0", "--jobs must be in 1.."),
        ("--grid seed=0 --until accuracy", "until must be NAME=VALUE"),
        pytest.param("--grid seed=0 --until accurracy=1", "did you mean 'accuracy'", marks=pytest.mark.grid),
        ("--grid model.lora.rank=4,8", "--init-from must be a run's folder or a file from `export`"),
        ("", "--grid must be given"),
        ("--grid seed=0 --engine ray", "engine 'ray' needs the extra ray: pip install 'hyena_jax[ray]'"),
        ("--grid seed=0 --engine ray --jobs 0", "--jobs must be at least 1, got 0"),
        ("--grid seed=0 --engine ray --per-run GPU=0", "--per-run must be of positive amounts, got 'GPU=0'"),
        ("--grid seed=0 --engine ray --per-run GPU", "--per-run must be NAME=AMOUNT, such as GPU=1, got"),
        ("--grid seed=0 --per-run GPU=1", "--per-run must be left out unless engine is 'ray'"),
        ("--grid seed=0 --engine slurm", "--engine"),
    ],
)
def test_wrong_commands_write_nothing(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    workdir = tmp_path / "sweep"
    small = "--model.n-layers 1 --model.pattern attention"
    command = f"sweep tasks:majority --workdir {workdir} {small} {arguments}"
    assert cli.main(command.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("hyena-jax: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not workdir.exists()
