"""`hyena-jax launch`: processes of one command on this machine, started, watched and ended together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any

from hyena_jax.cli.base import Command, note, read_command
from hyena_jax.cli.train import Train
from hyena_jax.config import AtLeast, AtMost
from hyena_jax.config.flags import HIDDEN
from hyena_jax.system.errors import require
from hyena_jax.system.signals import STOPPED_CODE, how_ended, noted_signals, start_process

POLL_EVERY = 0.05
"""Seconds between two looks at the processes."""

Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Launch(Command):
    """Train in several processes on this machine: hyena-jax launch --num-processes N -- train ..."""

    num_processes: Annotated[int, AtLeast(1), AtMost(256)]
    """Processes that train together; every batch is sharded over their devices."""
    grace: Annotated[float, AtLeast(0)] = 10.0
    """Seconds that the other processes have to end by themselves after one failed."""
    command: tuple[str, ...] = field(default=(), metadata=HIDDEN)
    """The command after `--`."""

    @classmethod
    def take(cls, called: str, arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
        """Takes the command after `--`; the plugins that it names are its own."""
        cut = arguments.index("--") if "--" in arguments else len(arguments)
        own, _ = super().take(called, arguments[:cut])
        return own, {"command": tuple(arguments[cut + 1 :])}

    def run(self, arguments: Sequence[str]) -> int:
        """Runs `hyena-jax COMMAND` in several processes that find each other over loopback.

        Signals that ask to stop are passed on to all processes; a second SIGINT ends them at once. If one
        process fails, the others have `grace` seconds to end by themselves, then they are killed, and its
        exit code is returned, 128 + N if signal N ended it. If the launcher is killed, they stop and save.
        """
        is_train = self.command[:1] == ("train",) and len(self.command) > 1
        require(is_train, "the command after --", " ".join(self.command), "train ...")
        with socket.socket() as probe:  # a free port
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        count = ["--num-processes", str(self.num_processes)]
        command = [*self.command, "--coordinator", address, *count, "--process-id"]
        # Help; and wrong flags are one error, not one from each process.
        if read_command(Train, "train", [*command[1:], "0"])[0] is None:
            return 0
        with noted_signals() as asked, ExitStack() as stack:
            pipe, held = os.pipe()  # when it closes, the processes know that the launcher is gone
            stack.callback(os.close, held)
            stack.callback(os.close, pipe)
            processes: list[Process] = []
            for i in range(self.num_processes):
                ours = [sys.executable, "-m", "hyena_jax.cli.launched", str(pipe), *command, str(i)]
                processes.append(start_process(ours, stdin=subprocess.DEVNULL, pass_fds=[pipe]))
                stack.callback(processes[-1].wait)
                stack.callback(processes[-1].kill)
            return _watch(processes, self.grace, note, asked)


def _watch(
    processes: Sequence[Process], grace: float, report: Callable[[str], None], asked: Sequence[int]
) -> int:
    """Waits for all processes, at most `grace` seconds after one failed; passes on the signals in `asked`."""
    n_sent, failed, deadline = 0, None, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        for number in asked[n_sent:]:
            n_sent += 1
            for process in reversed(processes):  # JAX aborts the others with a trace once process 0 is gone
                process.send_signal(number)
        if asked.count(signal.SIGINT) > 1:
            break
        if failed is None and (failed := _first_failed(processes)) is not None:
            deadline = time.monotonic() + grace
        time.sleep(POLL_EVERY)
    codes = [process.poll() for process in processes]
    if asked.count(signal.SIGINT) > 1 or any(code is not None and -code in asked for code in codes):
        name = signal.Signals(asked[0]).name
        is_interrupt = asked[0] == signal.SIGINT
        report("interrupted" if is_interrupt else f"stopped by {name}; rerun the command to continue")
        return 130 if is_interrupt else STOPPED_CODE
    failed = _first_failed(processes) if failed is None else failed
    if failed is None:
        return STOPPED_CODE if STOPPED_CODE in codes else 0
    code = processes[failed].returncode
    if not asked:
        report(f"process {failed} of {len(processes)} {how_ended(code)}; the others were ended too")
    return 128 - code if code < 0 else code


def _first_failed(processes: Sequence[Process]) -> int | None:
    """A failed process, preferably one ended by a signal: that may have caused the others. None if none."""
    failed = [i for i, process in enumerate(processes) if process.poll() not in (None, 0, STOPPED_CODE)]
    return min(failed, key=lambda i: processes[i].returncode > 0, default=None)
