"""How the process of a command ends when a signal comes while there is nothing to save."""

import os
import signal
import threading
from contextlib import suppress


class EndAtOnce:
    """A handler by which a signal ends the process with one line and an exit code, wherever it is.

    Nothing is raised, since a library may swallow it, and to leave the interpreter while XLA compiles in its
    threads is a segmentation fault. What a command writes must survive this, as it must survive SIGKILL.
    """

    def __init__(self, code: int, line: str):
        self.code = code
        self.line = line
        self._is_called = threading.Lock()

    def __call__(self, number: int, frame: object) -> None:
        if not self._is_called.acquire(blocking=False):  # it is under way, here or in another thread
            return
        with suppress(OSError):  # nobody reads
            if os.isatty(2):
                os.write(2, b"\x1b[?25h\n")  # a progress bar hides the cursor
            os.write(2, f"hyena-jax: {self.line}\n".encode())
        os._exit(self.code)


def end_at_once(number: int, code: int, line: str) -> None:
    """Ends the process at this signal, unless it is ignored (by nohup, or in a background job)."""
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, EndAtOnce(code, line))


def watch_signals() -> None:
    """Starts a thread that calls the handler of a signal, if it is EndAtOnce.

    Python calls handlers in the main thread, between its bytecodes, but native code may compile for minutes.
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
