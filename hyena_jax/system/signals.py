"""Signals that ask a process to stop: it ends at once, or saves first where there is something to save."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to stop: Ctrl-C, a scheduler that needs the machine, a terminal that closes."""
STOPPED_CODE = 75
"""Exit code after such a signal if nothing was lost: the same command continues, as EX_TEMPFAIL says."""
PATIENCE = 30.0
"""Seconds that a process has to stop and save once the process that started it is gone."""


class EndAtOnce:
    """A signal handler that ends the process at once, with one line and an exit code.

    It raises nothing: a library may swallow an exception, and leaving the interpreter while XLA's threads
    compile is a segmentation fault. What a command writes must survive this, as it survives SIGKILL.
    """

    def __init__(self, code: int, line: str):
        self.code = code
        self.line = line
        self._is_called = threading.Lock()

    def __call__(self, number: int, frame: object) -> None:
        if not self._is_called.acquire(blocking=False):  # already called, in this or another thread
            return
        with suppress(OSError):  # nobody reads the standard error
            if os.isatty(2):
                os.write(2, b"\x1b[?25h\n")  # a progress bar hides the cursor
            os.write(2, f"hyena-jax: {self.line}\n".encode())
        os._exit(self.code)


def end_at_once(number: int, code: int, line: str) -> None:
    """Makes the signal end the process, unless it is ignored (by nohup, or in a background job)."""
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, EndAtOnce(code, line))


def watch_signals() -> None:
    """Starts a thread that calls handlers of class EndAtOnce as soon as their signal arrives.

    Python calls handlers in the main thread between bytecodes, but native code may compile there for minutes.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            for number in os.read(read, 16):
                handler = signal.getsignal(number)
                if isinstance(handler, EndAtOnce):
                    handler(number, None)

    threading.Thread(target=watch, name="signals", daemon=True).start()


class Interrupted(KeyboardInterrupt):
    """The work was asked to stop, and saved; the same call continues it."""


class StopRequest:
    """Set once a signal asks the process to stop, after `defer`; `name` is the name of the signal."""

    name: str | None = None

    def __init__(self, usual: dict[int, Any]):
        self._usual = usual

    @property
    def is_set(self) -> bool:
        """Whether a signal came."""
        return self.name is not None

    def defer(self) -> None:
        """From now on signals are only recorded, since there is a step to save."""
        for number in self._usual:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The usual handler is called, not installed: `watch_signals` would call it at once.
        usual = self._usual[number]
        if self.name is None or number != signal.SIGINT:
            self.name = self.name or signal.Signals(number).name
        elif callable(usual):
            usual(number, frame)
        else:
            signal.signal(number, usual)
            signal.raise_signal(number)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Yields a request that signals set after its `defer`; until then they act as usual.

    After the first signal, a second Ctrl-C acts as usual.
    """
    with _usual_handlers() as usual:
        yield StopRequest(usual)


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Yields a list that collects the signals asking to stop."""
    asked: list[int] = []
    with _usual_handlers() as usual:
        for number in usual:
            signal.signal(number, lambda number, _: asked.append(number))
        yield asked


@contextmanager
def raising(number: int, error: BaseException) -> Iterator[None]:
    """A signal raises `error`, so that what was begun is tidied up; commands end at once otherwise."""

    def handle(*_: Any) -> None:
        raise error

    with _usual_handlers() as usual:
        if number in usual:
            signal.signal(number, handle)
        yield


@contextmanager
def _usual_handlers() -> Iterator[dict[int, Any]]:
    """Yields the handlers of the signals that ask to stop, by number; at the end they are set again.

    Without ignored signals, which stay so: SIGHUP under nohup, SIGINT in a background job. Python handles
    signals only in the main thread: in another thread there are none.
    """
    can_handle = threading.current_thread() is threading.main_thread()
    usual = {number: signal.getsignal(number) for number in STOPPING if can_handle}
    usual = {number: handler for number, handler in usual.items() if handler != signal.SIG_IGN}
    try:
        yield usual
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def start_process(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process that is asked to stop by this one alone; signals wait until it calls `take_signals`.

    It has its own group, or Ctrl-C would reach it twice: from the terminal and from this process.
    """
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        return subprocess.Popen(command, process_group=0, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)


def how_ended(code: int) -> str:
    """How a process ended, after its name, from the exit code that `subprocess` gives."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def take_signals() -> None:
    """Lets signals end this process at once, and unblocks those that its parent blocked while starting it."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # KeyboardInterrupt would need the interpreter
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def stop_and_end() -> None:
    """Asks this process to stop, and kills it after PATIENCE seconds."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)


def end_with(pipe: int) -> None:
    """Starts a thread that calls `stop_and_end` once the write end of `pipe` closes."""

    def wait() -> None:
        os.read(pipe, 1)  # nothing is ever written: this returns once the write end is closed
        stop_and_end()

    threading.Thread(target=wait, name="parent", daemon=True).start()


def processes_beside() -> Any:
    """The context of `multiprocessing` for processes that call `begin_beside`."""
    import multiprocessing  # 50 ms, of which other processes need nothing

    # The process that removes what this one leaves is the last to end, and would warn after its last line.
    silence = "ignore::UserWarning:multiprocessing.resource_tracker"
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), silence]))
    return multiprocessing.get_context("spawn")


def begin_beside() -> None:
    """For a process that `multiprocessing` started: signals end it at once, and so does its parent's end."""
    import multiprocessing.connection

    take_signals()
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
