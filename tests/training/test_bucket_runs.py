"""Runs whose folder is in a bucket: the same as on a disk, and what they survive."""

import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import test_distributed as distributed
import whole_runs
from bucket_server import BUCKET
from test_distributed import until
from whole_runs import with_training

import hyena_jax
from hyena_jax import cli
from hyena_jax.system.errors import UserError
from hyena_jax.system.signals import Interrupted
from hyena_jax.system.storage import mirror
from hyena_jax.system.storage.bucket import ABSENT, Bucket
from hyena_jax.system.storage.bucket_steps import BucketSteps
from hyena_jax.system.storage.lease import LOCK_OBJECT
from hyena_jax.system.storage.location import Location
from hyena_jax.system.storage.mirror import opened
from hyena_jax.training.checkpoint import Checkpoints, Meta, saved_steps
from hyena_jax.training.run import train

pytestmark = pytest.mark.xdist_group("trained")  # it shares a run with `test_loop`


def below(url: str) -> Bucket:
    return Bucket(Location.parse(url, "workdir"))


def names(url: str, prefix: str = "") -> list[str]:
    return [found.name for found in below(url).below(prefix)]


def steps(url: str) -> list[int]:
    return saved_steps(opened(url) / "checkpoints")


def rows(where) -> list[dict]:
    return whole_runs.rows(opened(where))


def assert_same_end(url: str, folder: Path) -> None:
    """The newest checkpoints hold the same bits, and the same rows were logged."""
    ours, theirs = hyena_jax.load_run(url), hyena_jax.load_run(folder)
    assert ours.step == theirs.step
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    assert rows(url) == rows(folder)


@pytest.mark.grid
def test_a_stopped_run_ends_as_one_on_a_disk(bucket, whole, experiment, console, monkeypatch):
    usual = mirror.Mirror.put

    def put(self):
        usual(self)
        if any(name.startswith("metrics/") for name in names(bucket)):
            signal.raise_signal(signal.SIGTERM)

    logging = dataclasses.replace(experiment.logging, tensorboard=True)
    experiment = dataclasses.replace(experiment, logging=logging)
    with monkeypatch.context() as patch:
        patch.setattr(mirror.Mirror, "put", put)
        with pytest.raises(
            Interrupted, match=rf"stopped by SIGTERM; saved at step 5\. .* --resume {bucket}$"
        ):
            train(experiment, opened(bucket), console)
    assert steps(bucket) == [5, 4]
    train(experiment, opened(bucket), console)
    assert "continuing after step 5" in console.file.getvalue()
    assert steps(bucket) == [12, 8]
    assert below(bucket).stat(LOCK_OBJECT).size == 0
    files = [name for name in names(bucket) if "/" not in name]
    assert files == ["config.json", "data.json", "learning_curves.png", "lock.json"]
    assert names(bucket, "metrics/") == ["metrics/00000.jsonl"]
    events = names(bucket, "tensorboard/")
    assert len(events) == 2
    for name in events:
        data = below(bucket).get(name)
        assert mirror._whole_records(data) == len(data) > 100
    assert_same_end(bucket, whole)


@pytest.fixture
def experiment(experiment):
    """With fewer checkpoints, each of which takes tenths of a second: after 4, 8 and 12 steps."""
    return with_training(experiment, checkpoint_every=4)


@pytest.fixture
def run(bucket, experiment, console) -> str:
    """The URL of the run, never stopped."""
    train(experiment, opened(bucket), console)
    return bucket


@pytest.mark.grid
@pytest.mark.parametrize(
    ("harm", "said"),
    [("rewritten", "is not what was saved"), pytest.param("deleted", "is missing", marks=pytest.mark.cloud)],
)
def test_a_damaged_checkpoint_is_deleted_and_the_one_before_is_used(
    run, whole, experiment, console, harm, said
):
    """And what a kill left of step 3 while it was deleted is deleted too."""
    bucket = below(run)
    bucket.put("checkpoints/3/params/d/0", b"rest")
    largest = max(bucket.below("checkpoints/12/params/"), key=lambda found: found.size).name
    if harm == "rewritten":
        bucket.put(largest, bucket.get(largest))
    else:
        bucket.delete([largest])
    assert hyena_jax.load_run(run, quiet=True).step == 8
    train(experiment, opened(run), console)
    output = " ".join(console.file.getvalue().split())
    assert f"checkpoint 12 is damaged: deleted ({largest.removeprefix('checkpoints/12/')} {said})" in output
    assert "continuing after step 8" in output
    assert names(run, "checkpoints/3/") == []
    assert_same_end(run, whole)


@pytest.mark.grid
def test_an_owner_that_lost_the_lock_writes_no_more(run, experiment, console, monkeypatch):
    """Another process takes the lock over before a checkpoint is committed."""
    commit = BucketSteps.commit

    def taken_over(self, step):
        if step == 16:
            below(run).put(LOCK_OBJECT, b"{}")
            below(run).put("metrics/00000.jsonl", b"")
        commit(self, step)

    monkeypatch.setattr(BucketSteps, "commit", taken_over)
    with pytest.raises(OSError, match=rf"{run} was taken over by another process"):
        train(with_training(experiment, steps=24), opened(run), console)
    assert steps(run) == [12, 8]
    assert below(run).get(LOCK_OBJECT) == b"{}"
    assert below(run).get("metrics/00000.jsonl") == b""


@pytest.mark.grid
def test_metrics_in_parts(run, whole, experiment, console, monkeypatch):
    """Sealed early; rows beyond the checkpoint are dropped, in sealed parts too."""
    below(run).delete(names(run, "checkpoints/12/"))
    below(run).delete(["metrics/00000.jsonl"])
    lines = (whole / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for i in range(0, len(lines), 2):
        below(run).put(f"metrics/{i // 2:05d}.jsonl", b"".join(lines[i : i + 2]), ABSENT)
    monkeypatch.setattr(mirror, "SEALED", 300)
    first = below(run).stat("metrics/00000.jsonl")
    train(experiment, opened(run), console)
    assert len(names(run, "metrics/")) > 2
    assert below(run).stat("metrics/00000.jsonl") == first
    assert_same_end(run, whole)


@pytest.mark.cloud
def test_a_file_that_a_cleaner_of_tmp_removes_stays_in_the_bucket(bucket):
    path = opened(bucket)
    with mirror.Mirror(path, print) as kept:
        (path / "config.json").write_text("{}")
        kept.put()
        (path / "config.json").unlink()
        kept.put()
    assert "config.json" in names(bucket)


def test_metrics_are_put_again_where_the_answer_was_lost_or_a_paused_writer_still_put(bucket, monkeypatch):
    """The paused writer looked at the lock before, and has woken up after another took it."""
    path, metrics = opened(bucket), "metrics/00000.jsonl"
    with mirror.Mirror(path, print) as kept:
        log, put = path / "metrics.jsonl", Bucket.put
        log.write_text("1\n")
        kept.put()
        below(bucket).put(metrics, b"0\n")
        log.write_text("1\n2\n")
        kept.put()
        assert below(bucket).get(metrics) == b"1\n2\n"

        def lost(self, *args):
            put(self, *args)
            raise OSError("does not answer")

        monkeypatch.setattr(Bucket, "put", lost)
        log.write_text("1\n2\n3\n")
        with pytest.raises(OSError, match="does not answer"):
            kept.put()
        monkeypatch.setattr(Bucket, "put", put)
        log.write_text("1\n2\n3\n4\n")
    assert below(bucket).get(metrics) == b"1\n2\n3\n4\n"


def test_a_checkpoint_that_a_paused_writer_finished_is_replaced(bucket):
    """All but its manifest, after another process has looked for checkpoints."""
    path = opened(bucket)
    with mirror.Mirror(path, print) as kept:
        ours, paused = (Checkpoints(path / "checkpoints", 2, print, kept.lease) for _ in range(2))
        with ours:
            assert ours.restore({"params": {"w": np.zeros(3)}}) is None
            with paused:
                paused.save(Meta(4), {"params": {"w": np.ones(3)}})
            below(bucket).delete(["checkpoints/4/manifest.json"])
            ours.save(Meta(4), {"params": {"w": np.zeros(3)}})
        with ours:
            assert not ours.restore({"params": {"w": np.zeros(3)}}).items["params"]["w"].any()


def test_a_folder_of_something_else_is_refused(bucket, experiment, console):
    below(bucket).put("holiday.jpg", bytes(10))
    for name in ("", "/"):
        with pytest.raises(
            UserError, match=f"must be empty or a run's folder, but '{bucket}' holds other files"
        ):
            train(experiment, opened(bucket + name), console)
    assert names(bucket) == ["holiday.jpg"]
    with pytest.raises(UserError, match="gs://no-such-bucket/run: there is no such bucket"):
        opened("gs://no-such-bucket/run")
    with pytest.raises(UserError, match=rf"workdir '{bucket}' holds no run"):
        hyena_jax.load_run(bucket)


def test_what_a_kill_leaves_of_a_new_folder_is_continued(bucket, experiment, console):
    for name in ("data.json", "base.json", "base.safetensors", "lock.json"):
        below(bucket).put(name, b"" if name == "lock.json" else b"{")
    train(with_training(experiment, steps=1), opened(bucket), console)
    assert steps(bucket) == [1]
    assert "base.json" not in names(bucket)


# The command line, with a short lease and little patience with the bucket.
PROGRAM = """
import sys
from hyena_jax import cli
from hyena_jax.system.storage import bucket, lease
lease.SECONDS = 2.0
bucket.Bucket.patience = 20.0
sys.exit(cli.main(sys.argv[1:]))
"""


def arguments(workdir, text) -> list[str]:
    return distributed.arguments(text, workdir, 40, "--parallel.devices", 1)


def started(url, text) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, *arguments(url, text)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(url, text) -> str:
    """What a start says that is not disturbed."""
    with started(url, text) as process:
        said = process.stdout.read()
    assert process.returncode == 0, said
    return said


@pytest.fixture
def on_disk(text, tmp_path) -> Path:
    """The same run in a folder of this machine, never stopped."""
    assert cli.main(arguments(tmp_path / "whole", text)) == 0
    return tmp_path / "whole"


@pytest.mark.cloud
def test_a_killed_run_continues_to_the_same_bits(bucket, text, on_disk):
    """Killed three times, some saves and a moment after it began."""
    draw, committed = random.Random(0), BucketSteps(below(f"{bucket}/checkpoints"))
    for _ in range(3):
        with started(bucket, text) as process:
            said = until(process, "compiling the training step")
            wanted = max(committed.saved(), default=0) + 2 * draw.randint(0, 3)
            while max(committed.saved(), default=0) < wanted and process.poll() is None:
                time.sleep(0.05)
            time.sleep(draw.uniform(0, 0.7))
            process.kill()
        assert not any("damaged" in line for line in said)
    assert "damaged" not in ended(bucket, text)
    assert_same_end(bucket, on_disk)


@pytest.mark.cloud
def test_a_paused_writer_that_wakes_up_stops(bucket, text):
    """Another process has continued its run meanwhile, and goes on undisturbed."""
    with started(bucket, text) as paused:
        until(paused, "step     20   validation loss")
        paused.send_signal(signal.SIGSTOP)
        with started(bucket, text) as other:
            until(other, "compiling the training step")
            paused.send_signal(signal.SIGCONT)
            said = paused.stdout.readlines()
            theirs = other.stdout.readlines()
    assert paused.returncode == 3
    assert other.returncode == 0, theirs[-3:]
    assert said[-1].startswith("hyena-jax: error: ")
    assert f"{bucket} was taken over by another process" in said[-1]
    assert steps(bucket)[:2] == [40, 38]
    assert [row["step"] for row in rows(bucket) if "train/loss" in row] == [*range(1, 41)]


@pytest.mark.cloud
def test_one_of_two_processes_is_killed_and_one_and_four_continue(bucket, text, tmp_path):
    """The four with another strategy."""
    arguments = partial(distributed.arguments, text)
    with distributed.launched(2, arguments(bucket, 100), grace=1) as launcher:
        until(launcher, "step      4   validation loss")
        os.kill(distributed.pid_of(launcher, 1), signal.SIGKILL)
        launcher.stdout.readlines()
        assert launcher.wait() == 128 + signal.SIGKILL
    below(bucket).put(LOCK_OBJECT, b"")  # else the next start waits for a lease of the usual length
    assert cli.main(arguments(bucket, 20)) == 0
    mesh = ["--parallel.strategy", "sharded", "--parallel.fsdp", "4"]
    said = distributed.ended(4, [*arguments(bucket, 26), *mesh])
    assert "continuing after step 20" in said
    assert cli.main(arguments(tmp_path / "one", 26)) == 0
    assert steps(bucket)[0] == 26
    for part in ("train", "validation"):
        found = whole_runs.losses(opened(bucket), part)
        assert found == pytest.approx(whole_runs.losses(tmp_path / "one", part), abs=1e-5)


@pytest.mark.cloud
def test_requests_that_fail_now_and_then_change_nothing(proxy, text, tmp_path, on_disk):
    draw, url = random.Random(0), f"gs://{BUCKET}/{tmp_path.name}"
    faults = (429, 503, "drop", "lose", 0.5)  # the last one a delay in seconds
    proxy.fault = lambda method, path: draw.choice(faults) if draw.random() < 0.03 else None
    ended(url, text)
    assert min(proxy.counts[fault] for fault in faults) > 0
    proxy.fault = lambda method, path: None
    assert_same_end(url, on_disk)


@pytest.mark.cloud
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (503, "it does not answer .*503"),
        pytest.param(507, "507 answered 507", marks=pytest.mark.grid),
    ],
)
def test_a_bucket_that_fails_for_good_costs_steps_but_nothing_saved(
    proxy, text, tmp_path, on_disk, fault, why
):
    url = f"gs://{BUCKET}/{tmp_path.name}{fault}"
    with started(url, text) as process:
        until(process, "step     20   validation loss")
        proxy.fault = lambda method, path: fault
        *_, last = process.stdout.readlines()
    assert process.returncode == 3
    assert re.search(f"hyena-jax: error: .*{url}.* cannot be read or written: {why}.*; nothing is lost", last)
    proxy.fault = lambda method, path: None
    assert re.search(r"continuing after step (16|18|20)\n", ended(url, text))
    assert_same_end(url, on_disk)


@pytest.mark.cloud
def test_every_command_takes_a_bucket(bucket, tmp_path, capsys, monkeypatch):
    """From a text to shards, a run on them, and all that reads it."""
    (tmp_path / "texts").mkdir()
    monkeypatch.chdir(tmp_path / "texts")
    for i in range(200):
        Path(f"{i}.txt").write_text(f"{i} bottles of beer on the wall, ")

    def output(*words: str) -> str:
        assert cli.main([word for part in words for word in part.split()]) == 0
        return capsys.readouterr().out

    shards, a, b = f"{bucket}/shards", f"{bucket}/a", f"{bucket}/b"
    output(f"prepare . --output {shards} --tokenizer bytes --eos 0 --held-out 0.2 --workers 1")
    assert "shards are as their index says" in output(f"prepare --verify --output {shards} --workers 1")
    settings = f"""
        quickstart --data shards --data.sources {shards} --data.seq-len 16 --data.batch-size 8
        --model.pattern.0.filter.width 4 --model.n-layers 1 --model.d-model 16 --model.d-ff 8
        --model.max-len 16 --parallel.devices 1 --logging.sample-tokens 4
        --training.eval-every 4 --training.checkpoint-every 2
    """
    output("train", settings, f"--workdir {a} --training.steps 4")
    output("train", settings, f"--workdir {b} --training.steps 4 --init-from {a} --model.dropout 0.1")
    assert "continuing after step 4" in output(f"train --resume {a} --training.steps 6")
    assert f"page: {a}/show.html" in output(f"show {a}")
    assert below(bucket).stat("a/show.html").size > 1000
    assert re.search(r"^ a +1 .*\n b +1 ", output(f"compare {a} {b}"), re.MULTILINE)
    assert len(output(f"generate {a} --prompt bottle --max-new-tokens 8 --temperature 1e-3")) > 8
    assert "bits_per_byte" in output(f"eval {a}")
    lines = tmp_path / "lines.txt"
    lines.write_text("two bottles\n")
    assert '"perplexity"' in output(f"score {a} --path {lines}")
    output(f"embed {a} --path {lines} --output {tmp_path}/states.npy")
    file = tmp_path / "params.safetensors"
    output(f"export {a} --output {file}")
    output("train", settings, f"--workdir {bucket}/c --training.steps 1 --init-from {file}")
    output(f"distill {a} --output {tmp_path}/small --state-size 4")
    sweep = f"--workdir {bucket}/sweep --training.steps 4 --grid seed=0,1 --init-from {a}"
    output("sweep", settings, sweep)
    assert f"all 2 runs have ended: {bucket}/sweep" in output("sweep", settings, sweep)
    assert "seed" in output(f"compare {bucket}/sweep --by seed")
    assert not Path("gs:").exists()
