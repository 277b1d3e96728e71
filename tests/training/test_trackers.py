"""Trackers get the rows of a run, and a run outlives them."""

import json
import math
import re
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from whole_runs import losses, with_training

import hyena_jax
from hyena_jax import cli, config
from hyena_jax.api import load_run
from hyena_jax.cli.train import Train
from hyena_jax.config import (
    Experiment,
    LoggingConfig,
    TensorBoardConfig,
    TrackerConfig,
    WandbConfig,
    register,
)
from hyena_jax.config.flags import read_flags
from hyena_jax.system.errors import UserError
from hyena_jax.training.metrics import MetricsLog, read_rows
from hyena_jax.training.run import train
from hyena_jax.training.trackers import EventFile, Start, Tracker, Trackers

pytestmark = pytest.mark.usefixtures("own_parts")


@dataclass(frozen=True)
class NotedConfig(TrackerConfig):
    project: str = ""


NOTED = []
"""What the trackers of a test were told."""


class Noted(Tracker):
    def __init__(self, config, start):
        self.note("start", start.first_step)

    def write(self, step, values):
        self.note("write", step, sorted(values))

    def sync(self):
        self.note("sync")

    def close(self, failed):
        self.note("close", failed)

    def note(self, what, *values):
        NOTED.append((what, *values))


@pytest.fixture
def noted(experiment, own_parts):
    NOTED.clear()
    register("noted", NotedConfig, Noted)
    return replace(experiment, logging=LoggingConfig(tensorboard=False, trackers=(NotedConfig("ours"),)))


@pytest.mark.grid
def test_a_tracker_is_given_the_rows_and_told_where_they_repeat(noted, tmp_path, console):
    train(with_training(noted, steps=6), tmp_path / "run", console)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert NOTED[0] == ("start", 1)
    assert NOTED[-1] == ("close", False)
    written = [("write", row["step"], sorted(row.keys() - {"step", "time"})) for row in rows]
    assert [note for note in NOTED if note[0] == "write"] == written
    n_saved = NOTED.count(("sync",))
    assert n_saved == 3  # at steps 4, 5 and 6
    NOTED.clear()
    train(with_training(noted, steps=9), tmp_path / "run", console)
    assert NOTED[0] == ("start", 7)
    assert [note[1] for note in NOTED if note[0] == "write"] == [8, 9, 9]


def test_what_is_not_a_tracker_and_what_ends_the_process_refuse_a_new_run(noted, tmp_path):
    message = r"tracker 'noted' cannot start: SystemExit: 1 \(.*\)$"
    for make, expected in (
        (lambda config, start: 5, r"what tracker 'noted' makes must be a hyena_jax.*Tracker, got 5$"),
        (lambda config, start: sys.exit(1), message),
    ):
        register("noted", NotedConfig, make)
        with pytest.raises(UserError, match=expected):
            Trackers(Start(tmp_path, noted, 1), print)


ERRORS = [RuntimeError("no\n(a second line)"), GeneratorExit("gone"), SystemExit(0)]


@pytest.mark.parametrize("error", [*ERRORS, type("Own", (BaseException,), {})()])
@pytest.mark.parametrize("broken", ["start", "write", "sync", "close"])
def test_a_tracker_that_raises_anything_is_left_out_with_one_line(noted, tmp_path, broken, error):
    """Of a run that continues."""

    class Raises(Noted):
        def note(self, what, *values):
            super().note(what, *values)
            if what == broken or (what == "close" and broken != "start"):
                raise error

    register("noted", NotedConfig, Raises)
    lines = []
    with Trackers(Start(tmp_path, noted, 5), lines.append) as trackers:
        for step in (1, 2):
            trackers.write(step, {"train/loss": 1.0})
            trackers.sync()
    (line,) = lines
    fault = "cannot start" if broken == "start" else "failed"
    message = str(error).partition("\n")[0]
    assert line.startswith(f"tracker 'noted' {fault}: {type(error).__name__}: {message} ({__file__}:")
    told = [note[0] for note in NOTED]
    assert (told.count(broken), told.count("close")) == (1, broken != "start")
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), Trackers(Start(tmp_path, noted, 5), lines.append) as trackers:
        trackers.write(1, {})
        trackers.sync()


def test_a_run_that_fails_says_so_to_its_trackers(noted, tmp_path, console):
    def fails(*_):
        raise KeyError("hooks")

    with pytest.raises(KeyError):
        train(noted, tmp_path / "run", console, make_hooks=fails)
    assert NOTED == [("start", 1), ("close", True)]


def test_config_json_names_trackers_only_if_there_are_any(noted):
    plain = config.encode(Experiment())["logging"]
    assert plain == {"tensorboard": True, "sample_tokens": 256, "sample_prompt": None, "sample_images": 40}
    values = json.loads(json.dumps(config.encode(noted)))
    assert values["logging"]["trackers"] == [{"type": "noted", "project": "ours"}]
    assert next(iter(values["plugins"].values()))["parts"] == ["tracker noted"]
    assert config.decode(values) == noted


def test_tensorboard_is_one_of_the_trackers():
    names = [type(tracker).__name__ for tracker in LoggingConfig(trackers=(WandbConfig(),)).all_trackers]
    assert names == ["TensorBoardConfig", "WandbConfig"]
    named = LoggingConfig(tensorboard=True, trackers=(TensorBoardConfig(),))
    assert named.all_trackers == (TensorBoardConfig(),)
    with pytest.raises(UserError, match="trackers must be different from each other, got 'wandb, wandb'"):
        LoggingConfig(trackers=(WandbConfig(), WandbConfig("b")))


def test_tensorboard_files_hold_the_values(tmp_path):
    event_file_loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    start = Start(tmp_path, Experiment(), 1)
    with Trackers(start, print) as trackers, MetricsLog(tmp_path, 0, trackers) as log:
        log.write(3, {"train/loss": 0.5})
    events = event_file_loader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 0.5)]


def test_tensorboard_on_a_full_disk_is_left_out(tmp_path, monkeypatch):
    """Without it, writes would block once a queue is full. What fills the disk ends the run elsewhere."""

    def full(self):
        raise OSError("full")

    threads, lines = threading.active_count(), []
    with Trackers(Start(tmp_path, Experiment(), 1), lines.append) as trackers:
        assert threading.active_count() == threads
        with monkeypatch.context() as patch:
            patch.setattr(EventFile, "sync", full)
            trackers.write(1, {"train/loss": 1.0})
            trackers.sync()
        trackers.write(2, {"train/loss": math.nan})
    (line,) = lines
    assert line.startswith("tracker 'tensorboard' failed: OSError: full")


def test_a_folder_that_tensorboard_cannot_write_is_the_machine_s_fault(tmp_path):
    (tmp_path / "tensorboard").touch()
    with pytest.raises(OSError, match="exists"):
        Trackers(Start(tmp_path, Experiment(), 5), print)


@pytest.mark.grid
def test_only_training_needs_a_tracker_s_plugin(noted, tmp_path, console, capsys):
    run = tmp_path / "run"
    train(with_training(noted, steps=2), run, console)
    del TrackerConfig.registry._parts["noted"]
    loaded = load_run(run, quiet=True)
    assert loaded.experiment.logging.trackers == ()
    assert cli.main(["compare", str(run)]) == 0
    resume = ["train", "--resume", str(run), "--training.steps", "3"]
    needs = f"tracker noted must be registered: add --plugin '{__file__}'"
    with pytest.raises(UserError, match=re.escape(needs)):
        hyena_jax.train(None, run)
    for given in ([], ["--logging.trackers.0.project", "theirs"]):
        assert cli.main([*resume, *given]) == 2
        assert needs in capsys.readouterr().err
    without = chosen([str(run / "config.json"), "--logging.trackers", ""])
    assert without.logging.trackers == ()
    train(with_training(without, steps=3), run, console)
    assert "tracker noted is left out; its plugin is not imported" in console.file.getvalue()
    assert "trackers" not in (run / "config.json").read_text()


def chosen(arguments: list[str]) -> Experiment:
    rest, defaults = Train.take("train", [*arguments, "--workdir", "x"])
    return read_flags(Train, "train", rest, defaults).experiment


def test_without_the_extra_one_line_names_it(experiment, tmp_path, console, monkeypatch):
    monkeypatch.delitem(sys.modules, "hyena_jax.training.wandb", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    wanted = replace(experiment, logging=LoggingConfig(trackers=(WandbConfig(),)))
    needs = r"tracker 'wandb' needs the package wandb: pip install 'hyena_jax\[wandb\]'$"
    with pytest.raises(UserError, match=needs):
        train(wanted, tmp_path / "run", console)
    assert not (tmp_path / "run").exists()


def test_wandb_offline_keeps_one_run_over_all_starts(experiment, tmp_path, console):
    pytest.importorskip("wandb", reason="needs the extra 'wandb'")
    run = tmp_path / "run"
    tracker = WandbConfig(project="ours", group="all", mode="offline")
    wanted = replace(experiment, logging=LoggingConfig(tensorboard=False, trackers=(tracker,)))
    train(with_training(wanted, steps=6), run, console)
    name = (run / "wandb_id.txt").read_text().strip()
    train(with_training(wanted, steps=9), run, console)
    assert (run / "wandb_id.txt").read_text().strip() == name
    assert "tracker" not in console.file.getvalue()
    found = {}
    for file in sorted((run / "wandb").glob(f"offline-run-*/run-{name}.wandb")):
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "run":
                assert (record.run.run_id, record.run.project, record.run.run_group) == (name, "ours", "all")
                assert "training" in {item.key for item in record.run.config.update}
            elif record.WhichOneof("record_type") == "history":
                row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                if "train/loss" in row:
                    found[record.history.step.num] = json.loads(row["train/loss"])
    assert [*found.values()] == losses(run)
    assert sorted(found) == [3, 6, 9]


def wandb_records(path: Path):
    """The records of W&B's file: a header of 7 bytes, then LevelDB's log format, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


def test_tensorboard_drops_rows_from_the_first_step_that_follows_on(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(EventFile, "_write", lambda _, **event: written.append(event))
    EventFile(TensorBoardConfig(), Start(tmp_path, Experiment(), first_step=13)).close(False)
    assert [event["step"] for event in written] == [13]
