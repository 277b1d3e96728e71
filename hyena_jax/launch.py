"""Several processes of one command on this machine: started, watched and ended together."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

# Seconds between two looks at the processes.
LOOK_EVERY = 0.05

Process = subprocess.Popen[bytes]


def launch(command: Sequence[str], n_processes: int, grace: float, report: Callable[[str], None]) -> int:
    """Runs `hyena-jax COMMAND` in `n_processes` processes that find each other over loopback.

    SIGINT and SIGTERM are passed on to all. If one process fails, the others have `grace` seconds to end by
    themselves and are killed then; one line says which it was.

    Returns:
      0, or the exit code of the process that failed first, 128 + N if signal N ended it.
    """
    processes: list[Process] = []
    meeting = ["--coordinator", f"127.0.0.1:{_free_port()}", "--num-processes", str(n_processes)]
    try:
        with _forwarded(processes) as forwarded:
            for i in range(n_processes):
                ours = [sys.executable, "-m", "hyena_jax", *command, *meeting, "--process-id", str(i)]
                # In a group of their own, or Ctrl-C would reach them twice: from the terminal and from here.
                processes.append(subprocess.Popen(ours, process_group=0))
            return _watch(processes, grace, report, forwarded)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _watch(
    processes: Sequence[Process], grace: float, report: Callable[[str], None], forwarded: Sequence[int]
) -> int:
    """Waits for all, or for `grace` seconds after the first that failed."""
    failed, deadline = None, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if failed is None and (failed := _first_failed(processes)) is not None and not forwarded:
            deadline = time.monotonic() + grace
        time.sleep(LOOK_EVERY)
    failed = _first_failed(processes) if failed is None else failed
    if failed is None:
        return 0
    if not forwarded:
        report(f"process {failed} of {len(processes)} {_how(processes[failed])}; the others were ended too")
    return _code(processes[failed])


def _first_failed(processes: Sequence[Process]) -> int | None:
    """Of several, one that a signal ended: it was the cause, the others its consequence."""
    failed = [i for i, process in enumerate(processes) if process.poll()]
    return min(failed, key=lambda i: processes[i].returncode > 0, default=None)


def _how(process: Process) -> str:
    code = process.returncode
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _code(process: Process) -> int:
    return 128 - process.returncode if process.returncode < 0 else process.returncode


@contextmanager
def _forwarded(processes: Sequence[Process]) -> Iterator[Sequence[int]]:
    """Passes SIGINT and SIGTERM on; yields those that came so far."""
    came: list[int] = []

    def forward(number: int, _: object) -> None:
        came.append(number)
        for process in processes:
            process.send_signal(number)

    usual = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
