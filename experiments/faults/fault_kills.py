"""Stopping a run at all kinds of moments, and continuing it."""

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fault_runs import EVERY, HALF, STEPS, Lab, Started, demand, demand_same_end, last_row, newest

from hyena_jax.training.checkpoint import saved_steps
from hyena_jax.training.checkpoint_files import is_verified

TEMPORARY = "orbax-checkpoint-tmp"


class Trial(NamedTuple):
    """One trial of a fault; `run(workdir)` raises NotSurvived, or returns notes for the results."""

    fault: str
    name: str
    run: Callable[[Path], dict]


@dataclass(frozen=True)
class Stage:
    """The runs that trials start from and compare with."""

    lab: Lab
    whole: Path
    """The undisturbed run of STEPS steps."""
    half: Path
    """The same run, trained to HALF."""
    seconds: float
    """Seconds of the whole command."""
    together: Path
    """The undisturbed run of STEPS steps in two processes."""
    together_seconds: float

    def copy_half(self, workdir: Path) -> Path:
        """A copy of the run at HALF, ready to be continued."""
        shutil.copytree(self.half, workdir)
        return workdir

    def finish(self, workdir: Path, after: int | None) -> str:
        """Continues a run, demands that it starts after that step and ends alike, and returns its output."""
        ended = self.lab.train(workdir)
        if after:
            ended.demand_text(f"continuing after step {after} ")
        demand_same_end(workdir, self.whole)
        return ended.text


def kills(stage: Stage, count: int, seed: int) -> Iterator[Trial]:
    """SIGKILL: some at any time or after any step, the others at moments that are hard to hit by chance."""
    generator = random.Random(seed)
    moments = [
        ("at any time", kill_any_time),
        ("inside a checkpoint write", kill_in_write),
        ("after any step", kill_after_step),
        ("between commit and manifest", kill_before_manifest),
        ("while the folder is made", kill_in_creation),
        ("while an old checkpoint is deleted", kill_in_deletion),
        ("inside a checkpoint write", kill_in_write),
        ("in each third of the steps", kill_thrice),
    ]
    left = count
    for i in range(count):
        name, act = moments[i % len(moments)]
        n_kills = 3 if act is kill_thrice else 1
        if left < n_kills:
            name, act, n_kills = "at any time", kill_any_time, 1
        left -= n_kills
        yield Trial(f"SIGKILL {name}", f"kill {count - left}", partial(act, stage, generator.random()))
        if left == 0:
            return


def kill_any_time(stage: Stage, fraction: float, workdir: Path) -> dict:
    """Kills the run between the process's start and its expected end."""
    started = stage.lab.start(workdir)
    time.sleep(fraction * stage.seconds)
    return _kill_and_finish(stage, started, workdir, lambda: True)


def kill_after_step(stage: Stage, fraction: float, workdir: Path) -> dict:
    """Kills the run up to 50 ms after a step."""
    step, delay = 1 + int(fraction * (STEPS - 1)), random.Random(fraction).uniform(0, 0.05)
    started = stage.lab.start(workdir)
    hit = started.wait_for(lambda: last_row(workdir) >= step)
    time.sleep(delay)
    return _kill_and_finish(stage, started, workdir, lambda: hit)


def kill_thrice(stage: Stage, fraction: float, workdir: Path) -> dict:
    """Kills the run three times, each time in another third of its steps."""
    generator, after, third = random.Random(fraction), [], STEPS // 3
    for begin in range(0, STEPS, third):
        step = generator.randrange(begin + 2 * EVERY + 1, begin + third)
        started = stage.lab.start(workdir)
        demand(started.wait_for(lambda step=step: last_row(workdir) >= step), "it ended early")
        started.kill()
        after.append(last_verified(workdir))
    demand(0 < after[0] < after[1] < after[2], f"checkpoints were lost: {after}")
    stage.finish(workdir, after[-1] if after[-1] < STEPS else None)
    return {"newest checkpoints": after}


def kill_in_write(stage: Stage, fraction: float, workdir: Path) -> dict:
    """Kills the run up to 60 ms after a save began; a save takes about as long."""
    generator = random.Random(fraction)
    step, delay = generator.randrange(EVERY, STEPS, EVERY), generator.uniform(0, 0.06)
    folder = workdir / "checkpoints" / f"{step}.{TEMPORARY}"
    started = stage.lab.start(workdir)
    hit = started.wait_for(folder.exists)
    time.sleep(delay)
    return _kill_and_finish(stage, started, workdir, lambda: hit and folder.exists())


def kill_before_manifest(stage: Stage, fraction: float, workdir: Path) -> dict:
    """Kills the run as soon as a checkpoint is committed."""
    step = random.Random(fraction).randrange(EVERY, STEPS, EVERY)
    folder = workdir / "checkpoints" / str(step)
    started = stage.lab.start(workdir)
    started.wait_for(folder.exists)
    manifest = folder / "manifest.json"
    return _kill_and_finish(stage, started, workdir, lambda: folder.exists() and not manifest.exists())


def kill_in_deletion(stage: Stage, fraction: float, workdir: Path) -> dict:
    """Kills the run as soon as the first file of an old checkpoint is deleted."""
    step = random.Random(fraction).randrange(EVERY, HALF, EVERY)
    folder = workdir / "checkpoints" / str(step)
    started = stage.lab.start(workdir)
    started.wait_for((folder / "manifest.json").exists)
    names = [path for path in folder.rglob("*") if path.is_file()]
    started.wait_for(lambda: not all(path.exists() for path in names))
    return _kill_and_finish(stage, started, workdir, folder.exists)


def kill_in_creation(stage: Stage, fraction: float, workdir: Path) -> dict:
    """Kills the run up to 3 ms after its folder appeared."""
    started = stage.lab.start(workdir)
    started.wait_for(workdir.exists)
    time.sleep(0.003 * fraction)
    return _kill_and_finish(stage, started, workdir, lambda: not (workdir / "config.json").exists())


def _kill_and_finish(stage: Stage, started: Started, workdir: Path, is_hit: Callable[[], bool]) -> dict:
    started.kill()
    hit = is_hit()
    after = last_verified(workdir)
    row = last_row(workdir)
    demand(row - after <= 2 * EVERY + 1, f"step {row} was reached, but the newest checkpoint is {after}")
    text = stage.finish(workdir, after if after < STEPS else None)
    return {"step": row, "checkpoint": after, "unverified": "is unverified" in text, "hit": hit}


def last_verified(workdir: Path) -> int:
    """The step that a run continues after: the newest with a manifest, or the newest if none has one."""
    checkpoints = workdir / "checkpoints"
    steps = saved_steps(checkpoints)
    return max(
        (step for step in steps if is_verified(checkpoints / str(step))), default=max(steps, default=0)
    )


def stops(stage: Stage, count: int, seed: int) -> Iterator[Trial]:
    """Signals that ask the run to stop."""
    generator = random.Random(f"stops {seed}")
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    for i in range(count):
        number = signals[i % len(signals)]
        step, delay = generator.randrange(1, STEPS - 10), generator.uniform(0, 0.1)
        yield Trial(number.name, f"after step {step}", partial(stop, stage, number, step, delay))
    yield Trial("SIGTERM twice", "", partial(stop_twice, stage))


def starts(stage: Stage, count: int, seed: int) -> Iterator[Trial]:
    """Signals at any moment while a new or a continued run starts."""
    generator = random.Random(f"starts {seed}")
    for i in range(count):
        number = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[i % 3]
        delay = generator.uniform(0.1, 0.5 * stage.seconds)
        trial = partial(stop_start, stage, number, delay, i % 2 == 1)
        yield Trial(f"{number.name} while it starts", f"after {delay:.2f} s", trial)


def stop(stage: Stage, number: signal.Signals, step: int, delay: float, workdir: Path) -> dict:
    """The run saves within a step, and its exit code says so."""
    started = stage.lab.start(workdir)
    demand(started.wait_for(lambda: last_row(workdir) >= step), "it ended early")
    time.sleep(delay)
    before, start = last_row(workdir), time.perf_counter()
    started.process.send_signal(number)
    ended = started.wait()
    seconds = time.perf_counter() - start
    ended.demand_code(75)
    ended.demand_text(f"stopped by {number.name}; saved at step")
    saved = newest(workdir)
    # A row may be written after we looked; then the current step is finished.
    demand(before <= saved <= before + 2, f"asked after step {before}, saved after step {saved}")
    demand(last_row(workdir) == saved, "rows beyond the checkpoint")
    stage.finish(workdir, saved)
    return {"asked after step": before, "saved after step": saved, "seconds": round(seconds, 2)}


def stop_start(stage: Stage, number: signal.Signals, delay: float, is_continued: bool, workdir: Path) -> dict:
    """The run prints one line; its exit code is 75 if a step was saved or a scheduler asked, else 130."""
    if is_continued:
        shutil.copytree(stage.half, workdir)
    started = stage.lab.start(workdir)
    time.sleep(delay)
    before, start = newest(workdir), time.perf_counter()
    started.process.send_signal(number)
    ended = started.wait()
    seconds = time.perf_counter() - start
    saved = newest(workdir)
    ended.demand_code(130 if number == signal.SIGINT and "saved at step" not in ended.text else 75)
    demand(saved >= before, f"checkpoint {before} is lost")
    stage.finish(workdir, saved)
    return {"step": saved, "seconds": round(seconds, 2)}


def stop_twice(stage: Stage, workdir: Path) -> dict:
    """A scheduler that repeats its signal does not break the save."""
    started = stage.lab.start(workdir)
    demand(started.wait_for(lambda: last_row(workdir) >= 7), "it ended early")
    for _ in range(5):
        started.process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    ended = started.wait()
    ended.demand_code(75)
    stage.finish(workdir, last_row(workdir))
    return {}
