"""Stopping a run at moments of all kinds, and going on."""

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
from hyena_jax.training.manifest import is_verified

TEMPORARY = "orbax-checkpoint-tmp"


class Trial(NamedTuple):
    """One fault, once; `run(workdir)` raises NotSurvived or returns what is worth a note."""

    fault: str
    name: str
    run: Callable[[Path], dict]


@dataclass(frozen=True)
class Stage:
    """What the trials start from."""

    lab: Lab
    whole: Path
    """The run of STEPS steps that nothing happened to."""
    half: Path
    """The same one, trained to HALF."""
    seconds: float
    """Time of the whole command."""
    together: Path
    """The run of STEPS steps in two processes that nothing happened to."""
    together_seconds: float

    def copy_half(self, workdir: Path) -> Path:
        """A run that waits to be continued."""
        shutil.copytree(self.half, workdir)
        return workdir

    def finish(self, workdir: Path, after: int | None) -> str:
        """Continues to the end, from that step, and compares; returns what was printed."""
        ended = self.lab.train(workdir)
        if after:
            ended.demand_text(f"continuing after step {after} ")
        demand_same_end(workdir, self.whole)
        return ended.text


def kills(stage: Stage, count: int, seed: int) -> Iterator[Trial]:
    """SIGKILL: two fifths of them at any time, the others at moments that are hard to hit by chance."""
    generator = random.Random(seed)
    moments = [
        ("at any time", kill_any_time),
        ("inside a checkpoint write", kill_in_write),
        ("at any time", kill_any_time),
        ("between commit and manifest", kill_before_manifest),
        ("while the folder is made", kill_in_creation),
        ("while an old checkpoint is deleted", kill_in_deletion),
        ("inside a checkpoint write", kill_in_write),
        ("at any time, three in a row", kill_thrice),
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
    """Between the start of the process and its expected end."""
    started = stage.lab.start(workdir)
    time.sleep(fraction * stage.seconds)
    return _kill_and_finish(stage, started, workdir, lambda: True)


def kill_thrice(stage: Stage, fraction: float, workdir: Path) -> dict:
    """Three kills; between them the run gets on by what it can save."""
    generator, after = random.Random(fraction), []
    for _ in range(3):
        started = stage.lab.start(workdir)
        time.sleep(generator.uniform(0.3, 1) * stage.seconds)
        started.kill()
        after.append(last_verified(workdir))
    demand(after == sorted(after), f"checkpoints were lost: {after}")
    stage.finish(workdir, after[-1] if after[-1] < STEPS else None)
    return {"newest checkpoints": after}


def kill_in_write(stage: Stage, fraction: float, workdir: Path) -> dict:
    """Up to 60 ms after a save began, which takes about as long."""
    generator = random.Random(fraction)
    step, delay = generator.randrange(EVERY, STEPS, EVERY), generator.uniform(0, 0.06)
    folder = workdir / "checkpoints" / f"{step}.{TEMPORARY}"
    started = stage.lab.start(workdir)
    hit = started.wait_for(folder.exists)
    time.sleep(delay)
    return _kill_and_finish(stage, started, workdir, lambda: hit and folder.exists())


def kill_before_manifest(stage: Stage, fraction: float, workdir: Path) -> dict:
    """As soon as a checkpoint is committed."""
    step = random.Random(fraction).randrange(EVERY, STEPS, EVERY)
    folder = workdir / "checkpoints" / str(step)
    started = stage.lab.start(workdir)
    started.wait_for(folder.exists)
    manifest = folder / "manifest.json"
    return _kill_and_finish(stage, started, workdir, lambda: folder.exists() and not manifest.exists())


def kill_in_deletion(stage: Stage, fraction: float, workdir: Path) -> dict:
    """As soon as the first file of an old checkpoint is gone."""
    step = random.Random(fraction).randrange(EVERY, HALF, EVERY)
    folder = workdir / "checkpoints" / str(step)
    started = stage.lab.start(workdir)
    started.wait_for((folder / "manifest.json").exists)
    names = [path for path in folder.rglob("*") if path.is_file()]
    started.wait_for(lambda: not all(path.exists() for path in names))
    return _kill_and_finish(stage, started, workdir, folder.exists)


def kill_in_creation(stage: Stage, fraction: float, workdir: Path) -> dict:
    """Up to 3 ms after the folder appeared."""
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
    """What a start continues after: the newest checkpoint with a manifest, or any where none has one."""
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
    """Signals at any moment of a start, new or continued."""
    generator = random.Random(f"starts {seed}")
    for i in range(count):
        number = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[i % 3]
        delay = generator.uniform(0.1, 0.5 * stage.seconds)
        trial = partial(stop_start, stage, number, delay, i % 2 == 1)
        yield Trial(f"{number.name} while it starts", f"after {delay:.2f} s", trial)


def stop(stage: Stage, number: signal.Signals, step: int, delay: float, workdir: Path) -> dict:
    """Saves within a step, and says so by its exit code."""
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
    # A row may be written after we looked; then the step under way is finished.
    demand(before <= saved <= before + 2, f"asked after step {before}, saved after step {saved}")
    demand(last_row(workdir) == saved, "rows beyond the checkpoint")
    stage.finish(workdir, saved)
    return {"asked after step": before, "saved after step": saved, "seconds": round(seconds, 2)}


def stop_start(stage: Stage, number: signal.Signals, delay: float, is_continued: bool, workdir: Path) -> dict:
    """One line, and 130 or 75: 75 where a step was saved, or where a scheduler asked."""
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
    """A scheduler that repeats itself does not break the save."""
    started = stage.lab.start(workdir)
    demand(started.wait_for(lambda: last_row(workdir) >= 7), "it ended early")
    for _ in range(5):
        started.process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    ended = started.wait()
    ended.demand_code(75)
    stage.finish(workdir, last_row(workdir))
    return {}
