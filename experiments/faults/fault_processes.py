"""Harm to one of two processes that train together, to their launcher, and to their connection."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from fault_kills import TEMPORARY, Stage, Trial, last_verified
from fault_runs import EVERY, STEPS, Started, demand, demand_same_end, last_row, newest

GRACE, PATIENCE, MEETING = 5, 60, 30
"""Seconds that the other processes get to end by themselves, that the launcher may take beyond them, and that
processes wait for each other: long enough for a busy machine, and short beside a wait that never ends."""


def processes(stage: Stage, count: int, seed: int) -> Iterator[Trial]:
    """One of two processes is killed, or their launcher is asked to stop."""
    generator = random.Random(f"processes {seed}")
    moments = [
        ("at any time", kill_one),
        ("inside a checkpoint write", kill_one_in_write),
        ("after any step", kill_one_after_step),
        ("inside a checkpoint write", kill_one_in_write),
    ]
    for i in range(count):
        killed, fraction = i % 2, generator.random()
        when, act = moments[i // 2 % len(moments)]
        trial = partial(act, stage, killed, fraction)
        yield Trial(f"one of two processes killed {when}", f"process {killed}, {i // 2}", trial)
    yield Trial("SIGTERM to the launcher of two processes", "", partial(stop_both, stage))


def kill_one(stage: Stage, killed: int, fraction: float, workdir: Path) -> dict:
    """Kills one process at any time after they started."""
    started = _launch(stage, workdir)
    time.sleep(0.1 + fraction * stage.together_seconds)
    return _kill_and_finish(stage, started, killed, workdir, lambda: True)


def kill_one_after_step(stage: Stage, killed: int, fraction: float, workdir: Path) -> dict:
    """Kills one process up to 50 ms after a step."""
    step, delay = 1 + int(fraction * (STEPS - 1)), random.Random(fraction).uniform(0, 0.05)
    started = _launch(stage, workdir)
    hit = started.wait_for(lambda: last_row(workdir) >= step)
    time.sleep(delay)
    return _kill_and_finish(stage, started, killed, workdir, lambda: hit)


def kill_one_in_write(stage: Stage, killed: int, fraction: float, workdir: Path) -> dict:
    """Kills one process while both write a checkpoint."""
    generator = random.Random(fraction)
    step, delay = generator.randrange(EVERY, STEPS, EVERY), generator.uniform(0, 0.06)
    folder = workdir / "checkpoints" / f"{step}.{TEMPORARY}"
    started = _launch(stage, workdir)
    started.wait_for(folder.exists)
    time.sleep(delay)
    return _kill_and_finish(stage, started, killed, workdir, folder.exists)


def stop_both(stage: Stage, workdir: Path) -> dict:
    """Both processes save at the same step."""
    started = _launch(stage, workdir)
    demand(started.wait_for(lambda: last_row(workdir) >= 7), "it ended early")
    started.process.terminate()
    ended = started.wait()
    demand(ended.code == 75, f"exit code {ended.code} instead of 75: {ended.text[-600:]}")
    ended.demand_text("stopped by SIGTERM; saved at step")
    _finish(stage, workdir, last_row(workdir))
    return {"saved after step": newest(workdir)}


def _launch(stage: Stage, workdir: Path) -> Started:
    return stage.lab.start(workdir, launch=("--num-processes", 2, "--grace", GRACE))


def _kill_and_finish(stage: Stage, started: Started, killed: int, workdir: Path, is_hit) -> dict:
    begun, pid = time.perf_counter(), _pid(started, killed)
    if pid is None:  # it had already finished
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
    row, after = last_row(workdir), last_verified(workdir)
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
    """The id of one of the processes; None once it has ended."""
    command = ["ps", "-ww", "--ppid", str(launcher.process.pid), "-o", "pid=,args="]
    while launcher.is_running:
        children = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        found = [line for line in children if line.endswith(f"--process-id {process_id}")]
        if found:
            return int(found[0].split()[0])
    return None


def meetings(stage: Stage) -> Iterator[Trial]:
    """Faults that keep processes from connecting, or separate them from their launcher."""
    for number in (signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT):
        yield Trial("launcher of two processes ended", number.name, partial(end_launcher, stage, number))
    yield Trial("launcher of two processes ended", "while they start", partial(end_launcher_early, stage))
    for name, text in (
        ("garbage", bytes(range(256)) * 40),
        ("HTTP", b"GET / HTTP/1.1\r\n\r\n"),
        ("silence", b""),
    ):
        yield Trial("a stranger at the coordinator's port", name, partial(connect, stage, text))
    yield Trial("a process of a number that trains already", "", partial(come_late, stage))
    cases = {
        "port in use": (1, (0,), 3, "Address already in use"),
        "two processes of one number": (3, (0, 1, 1), 2, "--process-id must differ between processes"),
        "process 1 does not come": (2, (0,), 3, "process 1 of 2 did not connect"),
        "process 0 does not come": (2, (1,), 3, "process 0 did not connect"),
    }
    for fault, (count, numbers, code, line) in cases.items():
        yield Trial(fault, "", partial(refuse, stage, count, numbers, code, line))


def end_launcher(stage: Stage, number: signal.Signals, workdir: Path) -> dict:
    """The launcher ends, and its processes stop and save."""
    started = _launch(stage, workdir)
    demand(started.wait_for(lambda: last_row(workdir) >= 7), "it ended early")
    begun = time.perf_counter()
    started.process.send_signal(number)
    ended = started.wait()  # until the last process has closed its output
    seconds = time.perf_counter() - begun
    if ended.code == 0:  # it had already finished
        return {"hit": False}
    code = 75 if number == signal.SIGHUP else -number
    demand(ended.code == code, f"exit code {ended.code} instead of {code}: {ended.text[-600:]}")
    demand("saved at step" in ended.text, f"nothing was saved: {ended.text[-1500:]}")
    demand("Traceback" not in ended.text, f"a traceback: {ended.text[-1500:]}")
    demand(seconds < PATIENCE, f"its processes ended after {seconds:.0f} s")
    saved = newest(workdir)
    _finish(stage, workdir, saved)
    return {"saved after step": saved, "seconds": round(seconds, 1), "hit": True}


def end_launcher_early(stage: Stage, workdir: Path) -> dict:
    """The launcher is killed before there is anything to save: its processes end immediately."""
    started = _launch(stage, workdir)
    demand(_pid(started, 1) is not None, "it ended early")
    started.process.kill()
    begun = time.perf_counter()
    ended = started.wait()
    seconds = time.perf_counter() - begun
    demand(seconds < PATIENCE, f"its processes ended after {seconds:.0f} s")
    demand("Traceback" not in ended.text, f"a traceback: {ended.text[-1500:]}")
    _finish(stage, workdir, newest(workdir))
    return {"seconds": round(seconds, 1)}


def connect(stage: Stage, text: bytes, workdir: Path) -> dict:
    """Connects before and after the processes have joined; the training ends as if undisturbed."""
    started = _launch(stage, workdir)
    port = int(_arguments(started, 1).partition("--coordinator 127.0.0.1:")[2].split()[0])
    talked, connections = 0, []
    while started.is_running and last_row(workdir) < STEPS // 2:
        with contextlib.suppress(OSError):
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=1))
            connections[-1].sendall(text)
            talked += 1
        for connection in connections[:-20]:
            connection.close()
        time.sleep(0.05)
    ended = started.wait()
    for connection in connections:
        connection.close()
    demand(ended.code == 0, f"exit code {ended.code} instead of 0: {ended.text[-1500:]}")
    demand_same_end(workdir, stage.together)
    return {"connections": talked, "hit": talked > 0}


def come_late(stage: Stage, workdir: Path) -> dict:
    """The second process is refused, and the training is not affected.

    Meanwhile process 1 of the training stands still, so that it cannot end before the others come.
    """
    started = _launch(stage, workdir)
    place = _arguments(started, 1).partition("--coordinator ")[2].split()[0]
    demand(started.wait_for(lambda: last_row(workdir) >= 7), "it ended early")
    paused = _pid(started, 1)
    demand(paused is not None, "it ended early")
    os.kill(paused, signal.SIGSTOP)
    try:
        for late in [_process(stage, workdir, place, 2, number) for number in (1, 0)]:
            ended = late.wait()
            ended.demand_code(3)
            ended.demand_text("another training, listens on coordinator|Address already in use")
    finally:
        os.kill(paused, signal.SIGCONT)
    ended = started.wait()
    demand(ended.code == 0, f"exit code {ended.code} instead of 0: {ended.text[-1500:]}")
    demand_same_end(workdir, stage.together)
    return {}


def refuse(stage: Stage, count: int, numbers: tuple[int, ...], code: int, line: str, workdir: Path) -> dict:
    """Every process reports the fault, and nothing is created."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        if "in use" not in line:
            taken.close()
        started = [_process(stage, workdir, place, count, number) for number in numbers]
        for ended in [process.wait() for process in started]:
            ended.demand_code(code)
            ended.demand_text(line)
    demand(not workdir.exists(), "the workdir was made")
    return {}


def _process(stage: Stage, workdir: Path, place: str, count: int, number: int) -> Started:
    meeting = ("--coordinator", place, "--num-processes", count, "--process-id", number)
    return stage.lab.start(workdir, *meeting, "--join-timeout", MEETING)


def _arguments(launcher: Started, process_id: int) -> str:
    """The command line of one of its processes."""
    pid = _pid(launcher, process_id)
    demand(pid is not None, "it ended early")
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
