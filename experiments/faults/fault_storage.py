"""Harm to a run's files, to its disk, and to its data."""

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fault_kills import Stage, Trial
from fault_runs import EVERY, HALF, STEPS, Ended, demand, demand_same_end, last_row, newest

from hyena_jax.training.checkpoint import saved_steps
from hyena_jax.training.checkpoint_files import damage_in
from hyena_jax.training.metrics import read_rows

AS_USER = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
"""Prefix that runs a command as root without root's right to ignore permissions."""


def _files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file with its contents."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def truncate(checkpoint: Path, generator: random.Random) -> None:
    path = max(_files(checkpoint / "params"), key=lambda path: path.stat().st_size)
    os.truncate(path, generator.randrange(path.stat().st_size))


def truncate_manifest(checkpoint: Path, generator: random.Random) -> None:
    path = checkpoint / "manifest.json"
    os.truncate(path, generator.randrange(path.stat().st_size))


def flip_bit(checkpoint: Path, generator: random.Random) -> None:
    path = generator.choice(_files(checkpoint))
    data = bytearray(path.read_bytes())
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    path.write_bytes(data)


def delete_half(checkpoint: Path, generator: random.Random) -> None:
    names = [path for path in _files(checkpoint) if path.name != "manifest.json"]
    for path in generator.sample(names, len(names) // 2):
        path.unlink()


def empty(checkpoint: Path, generator: random.Random) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def zeros(checkpoint: Path, generator: random.Random) -> None:
    path = generator.choice(_files(checkpoint / "train_state"))
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES = (truncate, flip_bit, delete_half, flip_bit, truncate_manifest, flip_bit, zeros, flip_bit, empty)


def damages(stage: Stage, count: int, seed: int) -> Iterator[Trial]:
    """Checkpoints that differ from what was saved."""
    generator = random.Random(f"damages {seed}")
    for i in range(count):
        harm = DAMAGES[i % len(DAMAGES)]
        name = harm.__name__.replace("_", " ")
        yield Trial(
            f"newest checkpoint: {name}", f"damage {i + 1}", partial(damage, stage, harm, generator.random())
        )
    yield Trial("the two newest checkpoints damaged", "", partial(damage_two, stage))
    yield Trial("all checkpoints damaged", "", partial(damage_all, stage))
    yield Trial("foreign files among the checkpoints", "", partial(foreign_files, stage))
    yield Trial("last line of metrics.jsonl torn", "", partial(torn_line, stage))


def damage(stage: Stage, harm: Callable, seed: float, workdir: Path) -> dict:
    """`eval` uses the checkpoint before and changes nothing; training sets the damaged one aside."""
    checkpoints = stage.copy_half(workdir) / "checkpoints"
    harm(checkpoints / str(HALF), random.Random(seed))
    before = contents(workdir)
    ended = stage.lab.command("eval", workdir).wait()
    ended.demand_text(f"checkpoint {HALF} is (damaged|unverified)")  # the latter without its manifest
    ended.demand_text(f"step {HALF - EVERY}")
    demand(ended.code == 0 and contents(workdir) == before, "eval changed the folder")
    text = stage.finish(workdir, HALF - EVERY)
    aside = [name for name in ("damaged", "unverified") if (checkpoints / f"{HALF}.{name}").is_dir()]
    demand(len(aside) == 1, "it was deleted")
    demand(f"checkpoint {HALF} is {aside[0]}: set aside as {HALF}.{aside[0]}" in text, text[-600:])
    return {}


def damage_two(stage: Stage, workdir: Path) -> dict:
    checkpoints = stage.copy_half(workdir) / "checkpoints"
    steps = saved_steps(checkpoints)
    for step in steps[:2]:
        truncate(checkpoints / str(step), random.Random(step))
    if len(steps) > 2:
        stage.finish(workdir, steps[2])
        return {"continued after": steps[2]}
    return {"skipped": "two checkpoints only"}


def damage_all(stage: Stage, workdir: Path) -> dict:
    """The run is refused, also the second time, and nothing is changed."""
    checkpoints = stage.copy_half(workdir) / "checkpoints"
    for step in saved_steps(checkpoints):
        truncate(checkpoints / str(step), random.Random(step))
    before = contents(workdir)
    for _ in range(2):
        stage.lab.train(workdir, code=2).demand_text("every checkpoint in .* is damaged")
        demand(contents(workdir) == before, "the folder was changed")
    ended = stage.lab.command("generate", workdir, "--prompt", "9").wait()
    demand(ended.code == 2, f"generate: exit code {ended.code}")
    ended.demand_text("holds no usable checkpoint")
    return {}


def foreign_files(stage: Stage, workdir: Path) -> dict:
    checkpoints = stage.copy_half(workdir) / "checkpoints"
    for name in ("notes.txt", ".DS_Store", "007", "40"):
        (checkpoints / name).write_text("not a checkpoint")
    (checkpoints / str(HALF) / "notes.txt").write_text("not of the checkpoint")
    text = stage.finish(workdir, HALF)
    demand("checkpoint 40 is unverified: set aside" in text, text[-600:])
    return {}


def torn_line(stage: Stage, workdir: Path) -> dict:
    with (stage.copy_half(workdir) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "train/loss": 1.0}\n{"step": 32, "train/lo')
    stage.finish(workdir, HALF)
    return {}


@contextmanager
def small_disk(folder: Path, megabytes: int = 16) -> Iterator[None]:
    """A file system of that size at `folder`, held in memory."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def may_mount(folder: Path) -> bool:
    """Whether this process may mount file systems."""
    try:
        with small_disk(folder):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        folder.rmdir()


def fill(disk: Path, leave: int) -> Path:
    """Writes a file that leaves only `leave` bytes of a disk."""
    ballast, block = disk / "ballast", bytes(4096)
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(block)
        except OSError:
            pass
    os.truncate(ballast, max(0, ballast.stat().st_size - leave))
    return ballast


def disks(stage: Stage, count: int, seed: int) -> Iterator[Trial]:
    """Disks that are full or read-only; trials that need a mount run only where mounting is permitted."""
    generator = random.Random(f"disks {seed}")
    for i in range(count):
        when = ("before the start", "while it trains")[i % 2]
        leave = generator.choice((0, 4096, generator.randrange(2**14, 2**19)))
        yield Trial(f"disk full {when}", f"{leave} bytes left", partial(full_disk, stage, when, leave))
    yield Trial("read-only file system, as root", "run", partial(read_only_disk, stage))
    yield Trial("read-only file system, as root", "new run", partial(read_only_new, stage))


def full_disk(stage: Stage, when: str, leave: int, workdir: Path) -> dict:
    """The run ends with exit code 3 and whole checkpoints, and continues once there is room."""
    with small_disk(workdir):
        run = stage.copy_half(workdir / "run")
        if when == "before the start":
            ballast = fill(workdir, leave)
            ended = stage.lab.start(run).wait()
        else:
            started = stage.lab.start(run)
            demand(started.wait_for(lambda: last_row(run) >= HALF + 3), "it ended early")
            ballast = fill(workdir, leave)
            ended = started.wait()
        reached = newest(run)
        if ended.code != 0:  # a run that fits into the remaining space is not disturbed
            _demand_failed(ended, run)
        ballast.unlink()
        stage.finish(run, reached if reached < STEPS else None)
    return {"exit code": ended.code, "newest checkpoint": reached, "said": _reason(ended)}


def _demand_failed(ended: Ended, run: Path) -> None:
    ended.demand_code(3)
    steps = saved_steps(run / "checkpoints")
    demand(steps and steps[0] >= HALF, f"checkpoints {steps}")
    damaged = [step for step in steps if damage_in(run / "checkpoints" / str(step))]
    demand(not damaged, f"damaged checkpoints {damaged}")


def _reason(ended: Ended) -> str:
    return ended.err.strip().removeprefix("hyena-jax: error: ")[:200]


def read_only_disk(stage: Stage, workdir: Path) -> dict:
    with small_disk(workdir):
        run = stage.copy_half(workdir / "run")
        subprocess.run(["mount", "-o", "remount,ro", workdir], check=True)
        ended = stage.lab.train(run, code=3)
        demand(stage.lab.command("eval", run).wait().code == 0, "eval needs to write")
        subprocess.run(["mount", "-o", "remount,rw", workdir], check=True)
        stage.finish(run, HALF)
    return {"said": _reason(ended)}


def read_only_new(stage: Stage, workdir: Path) -> dict:
    with small_disk(workdir):
        subprocess.run(["mount", "-o", "remount,ro", workdir], check=True)
        ended = stage.lab.train(workdir / "run", code=3)
    return {"said": _reason(ended)}


def permissions(stage: Stage) -> Iterator[Trial]:
    """Files and folders that cannot be written."""
    yield Trial("metrics.jsonl cannot be written", "a folder", partial(metrics_folder, stage))
    yield Trial("read-only workdir, as an ordinary user", "", partial(read_only_user, stage))


def metrics_folder(stage: Stage, workdir: Path) -> dict:
    path = stage.copy_half(workdir) / "metrics.jsonl"
    rows = path.read_bytes()
    path.unlink()
    path.mkdir()
    ended = stage.lab.train(workdir, code=2)
    path.rmdir()
    path.write_bytes(rows)
    stage.finish(workdir, HALF)
    return {"said": _reason(ended)}


def read_only_user(stage: Stage, workdir: Path) -> dict:
    """Root ignores permissions unless it gives up that right, as it does here."""
    folders = [stage.copy_half(workdir), *(path for path in workdir.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    before = contents(workdir)
    ended = stage.lab.start(workdir, prefix=AS_USER if os.geteuid() == 0 else ()).wait()
    for folder in folders:
        folder.chmod(0o755)
    ended.demand_code(3)
    demand(contents(workdir) == before, "the folder was changed")
    stage.finish(workdir, HALF)
    return {"said": _reason(ended)}


def data_and_rivals(stage: Stage) -> Iterator[Trial]:
    """The text is changed, or a second training uses the folder."""
    yield Trial("text changed between stop and start", "", partial(changed_text, stage))
    yield Trial("second training in a folder in use", "", partial(second_training, stage))
    for i in range(3):
        yield Trial("two trainings started at once", f"{i + 1}", partial(two_at_once, stage))


def changed_text(stage: Stage, workdir: Path) -> dict:
    """The run is refused; with the flag it continues, says so, and no longer needs the flag."""
    stage.copy_half(workdir)
    other = stage.lab.text.with_name(f"{workdir.name}.txt")
    other.write_text(stage.lab.text.read_text().replace("wall", "hall"))
    flags, before = ("--data.path", other), contents(workdir)
    stage.lab.train(workdir, *flags, code=2).demand_text("fingerprint differs; .*--accept-changed-data")
    demand(contents(workdir) == before, "the folder was changed")
    accepted = stage.lab.train(workdir, *flags, "--accept-changed-data", steps=HALF + EVERY)
    accepted.demand_text("changed since the last start: text: fingerprint")
    accepted.demand_text(f"continuing after step {HALF}")
    stage.lab.train(workdir, *flags)
    demand(
        [row["step"] for row in read_rows(workdir / "metrics.jsonl") if "train/loss" in row]
        == list(range(1, STEPS + 1)),
        "steps are missing",
    )
    other.unlink()
    return {}


def second_training(stage: Stage, workdir: Path) -> dict:
    """The second training is refused and changes nothing; the first is not affected."""
    started = stage.lab.start(workdir)
    demand(started.wait_for(lambda: last_row(workdir) >= 2), "it ended early")
    settings = (workdir / "config.json").read_bytes()
    started.process.send_signal(signal.SIGSTOP)  # it must not end before the second one looks
    try:
        ended = stage.lab.train(workdir, "--training.log-every", 3, code=2)
    finally:
        started.process.send_signal(signal.SIGCONT)
    ended.demand_text("is in use: another process trains there")
    demand((workdir / "config.json").read_bytes() == settings, "config.json was changed")
    demand(started.wait().code == 0, "the first did not end well")
    demand_same_end(workdir, stage.whole)
    return {}


def two_at_once(stage: Stage, workdir: Path) -> dict:
    both = [stage.lab.start(workdir) for _ in range(2)]
    codes = sorted(started.wait().code for started in both)
    # A training that starts after the other one is done finds a finished run.
    demand(codes in ([0, 2], [0, 0]), f"exit codes {codes}")
    demand_same_end(workdir, stage.whole)
    return {"exit codes": codes}
