"""Several processes of one command on this machine: started, watched and ended together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

# What asks processes to stop, and is passed on to them.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds between two looks at the processes.
LOOK_EVERY = 0.05
# The exit code of a training that was asked to stop and saved.
STOPPED = 75

Process = subprocess.Popen[bytes]


def launch(command: Sequence[str], n_processes: int, grace: float, report: Callable[[str], None]) -> int:
    """Runs `hyena-jax COMMAND` in `n_processes` processes that find each other over loopback.

    Signals that ask to stop are passed on to all; a second SIGINT ends them at once. If one process fails,
    the others have `grace` seconds to end by themselves and are killed then; one line says which it was.
    Processes whose launcher was killed stop by themselves, and save.

    Returns:
      0; or 75 after a stop that was asked for, but 130 where SIGINT left nothing to save; or the exit code of
      the process that failed first, 128 + N if signal N ended it.
    """
    meeting = ["--coordinator", f"127.0.0.1:{_free_port()}", "--num-processes", str(n_processes)]
    with _noted_signals() as asked, ExitStack() as stack:
        pipe, held = os.pipe()  # whose closing tells the processes that this one is gone
        stack.callback(os.close, held)
        stack.callback(os.close, pipe)
        processes: list[Process] = []
        for i in range(n_processes):
            ours = [sys.executable, "-m", "hyena_jax.launched", str(pipe), *command, *meeting]
            processes.append(_start([*ours, "--process-id", str(i)], pipe))
            stack.callback(_end, processes[-1])
        return _watch(processes, grace, report, asked)


def _start(command: Sequence[str], pipe: int) -> Process:
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until it has handlers for them
    try:
        # In a group of its own, or Ctrl-C would reach it twice: from the terminal and from here.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[pipe], process_group=0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)


def _end(process: Process) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _watch(
    processes: Sequence[Process], grace: float, report: Callable[[str], None], asked: Sequence[int]
) -> int:
    """Waits for all, or for `grace` seconds after the first that failed; passes on the signals in `asked`."""
    n_sent, failed, deadline = 0, None, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        for number in asked[n_sent:]:
            n_sent += 1
            for process in reversed(processes):  # JAX ends the others with a trace where the first is gone
                process.send_signal(number)
        if asked.count(signal.SIGINT) > 1:
            break
        if failed is None and (failed := _first_failed(processes)) is not None:
            deadline = time.monotonic() + grace
        time.sleep(LOOK_EVERY)
    codes = [process.poll() for process in processes]
    if asked.count(signal.SIGINT) > 1 or any(code is not None and -code in asked for code in codes):
        name = signal.Signals(asked[0]).name
        is_interrupt = asked[0] == signal.SIGINT
        report("interrupted" if is_interrupt else f"stopped by {name}; rerun the command to continue")
        return 130 if is_interrupt else STOPPED
    failed = _first_failed(processes) if failed is None else failed
    if failed is None:
        return STOPPED if STOPPED in codes else 0
    if not asked:
        report(f"process {failed} of {len(processes)} {_how(processes[failed])}; the others were ended too")
    return _code(processes[failed])


def _first_failed(processes: Sequence[Process]) -> int | None:
    """Of several, one that a signal ended: it was the cause, the others its consequence."""
    failed = [i for i, process in enumerate(processes) if process.poll() not in (None, 0, STOPPED)]
    return min(failed, key=lambda i: processes[i].returncode > 0, default=None)


def _how(process: Process) -> str:
    code = process.returncode
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _code(process: Process) -> int:
    return 128 - process.returncode if process.returncode < 0 else process.returncode


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Yields the signals that asked to stop so far; those that are ignored, as by nohup, stay so."""
    asked: list[int] = []
    usual = {number: signal.getsignal(number) for number in STOPPING}
    usual = {number: handler for number, handler in usual.items() if handler != signal.SIG_IGN}
    for number in usual:
        signal.signal(number, lambda number, _: asked.append(number))
    try:
        yield asked
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
