"""Harm to one of two processes that train together."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from fault_kills import TEMPORARY, Stage, Trial
from fault_runs import EVERY, STEPS, Started, demand, demand_same_end, last_row, newest

GRACE, PATIENCE = 5, 15
"""Seconds that the others get to end by themselves, and that this program allows the launcher beyond them."""


def processes(stage: Stage, count: int, seed: int) -> Iterator[Trial]:
    """One of two is killed, or the launcher is asked to stop."""
    generator = random.Random(f"processes {seed}")
    for i in range(count):
        killed, fraction = i % 2, generator.random()
        if i % 4 < 2:
            act, when = kill_one, "at any time"
        else:
            act, when = kill_one_in_write, "inside a checkpoint write"
        trial = partial(act, stage, killed, fraction)
        yield Trial(f"one of two processes killed {when}", f"process {killed}, {i // 2}", trial)
    yield Trial("SIGTERM to the launcher of two processes", "", partial(stop_both, stage))


def kill_one(stage: Stage, killed: int, fraction: float, workdir: Path) -> dict:
    """From the start of the processes on."""
    started = _launch(stage, workdir)
    time.sleep(0.1 + fraction * stage.together_seconds)
    return _kill_and_finish(stage, started, killed, workdir, lambda: True)


def kill_one_in_write(stage: Stage, killed: int, fraction: float, workdir: Path) -> dict:
    """While both write a checkpoint."""
    generator = random.Random(fraction)
    step, delay = generator.randrange(EVERY, STEPS, EVERY), generator.uniform(0, 0.06)
    folder = workdir / "checkpoints" / f"{step}.{TEMPORARY}"
    started = _launch(stage, workdir)
    started.wait_for(folder.exists)
    time.sleep(delay)
    return _kill_and_finish(stage, started, killed, workdir, folder.exists)


def stop_both(stage: Stage, workdir: Path) -> dict:
    """Both save at the same step."""
    started = _launch(stage, workdir)
    demand(started.wait_for(lambda: last_row(workdir) >= 7), "it ended early")
    started.process.terminate()
    ended = started.wait()
    demand(ended.code == 75, f"exit code {ended.code} instead of 75: {ended.text[-600:]}")
    ended.demand_text("stopped by SIGTERM and saved; the same command continues")
    _finish(stage, workdir, last_row(workdir))
    return {"saved after step": newest(workdir)}


def _launch(stage: Stage, workdir: Path) -> Started:
    return stage.lab.start(workdir, launch=("--num-processes", 2, "--grace", GRACE))


def _kill_and_finish(stage: Stage, started: Started, killed: int, workdir: Path, is_hit) -> dict:
    begun, pid = time.perf_counter(), _pid(started, killed)
    if pid is None:  # it was done already
        started.wait()
        _finish(stage, workdir, None)
        return {"hit": False}
    os.kill(pid, signal.SIGKILL)
    hit = is_hit()
    ended = started.wait()
    seconds = time.perf_counter() - begun
    code = 128 + signal.SIGKILL
    demand(ended.code == code, f"exit code {ended.code} instead of {code}: {ended.text[-600:]}")
    line = f"process {killed} of 2 was ended by SIGKILL; the others were ended too"
    demand(ended.text.count(line) == 1, f"{line!r} was not said once: {ended.text[-1500:]}")
    demand("Traceback" not in ended.text, f"a traceback: {ended.text[-1500:]}")
    demand(seconds < GRACE + PATIENCE, f"the other one ended after {seconds:.0f} s")
    row, after = last_row(workdir), newest(workdir)
    demand(row - after <= 2 * EVERY + 1, f"step {row} was reached, but the newest checkpoint is {after}")
    _finish(stage, workdir, after)
    return {"step": row, "checkpoint": after, "seconds": round(seconds, 1), "hit": hit}


def _finish(stage: Stage, workdir: Path, after: int | None) -> None:
    ended = _launch(stage, workdir).wait()
    demand(ended.code == 0, f"exit code {ended.code} instead of 0: {ended.text[-1500:]}")
    if after and after < STEPS:
        ended.demand_text(f"continuing after step {after} ")
    demand_same_end(workdir, stage.together)


def _pid(launcher: Started, process_id: int) -> int | None:
    """Of one of the processes; None once it has ended."""
    command = ["ps", "-ww", "--ppid", str(launcher.process.pid), "-o", "pid=,args="]
    while launcher.is_running:
        children = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        found = [line for line in children if line.endswith(f"--process-id {process_id}")]
        if found:
            return int(found[0].split()[0])
    return None
