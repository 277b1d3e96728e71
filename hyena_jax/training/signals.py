"""Stopping a run in good order."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# What asks a run to stop: Ctrl-C, a scheduler that wants its machine back, a terminal that is closed.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and nothing that was trained is lost.

    No Exception: it may be raised inside a library that would handle one.
    """


class StopRequest:
    """Set once the process was asked to stop; `name` is the signal's."""

    name: str | None = None
    is_deferred: bool = False
    """Whether a signal waits to be noticed, or raises Interrupted where the program is."""

    @property
    def is_set(self) -> bool:
        """Whether a signal came."""
        return self.name is not None

    def defer(self) -> None:
        """From here on a signal is only noted: there is something to save first."""
        self.is_deferred = True


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Signals set the request that is given out, or raise Interrupted until it is deferred.

    After the first one a second Ctrl-C acts as it always does; who insists otherwise sends SIGKILL. SIGHUP
    stays ignored where it was (nohup). Python handles signals in the main thread alone: in another thread
    the request is never set.
    """
    request = StopRequest()
    can_handle = threading.current_thread() is threading.main_thread()
    usual = {number: signal.getsignal(number) for number in STOPPING if can_handle}
    if usual.get(signal.SIGHUP) == signal.SIG_IGN:
        del usual[signal.SIGHUP]

    def note(number: int, _: FrameType | None) -> None:
        request.name = request.name or signal.Signals(number).name
        signal.signal(signal.SIGINT, usual[signal.SIGINT])
        if not request.is_deferred:
            request.defer()
            raise Interrupted(f"stopped by {request.name} before the next step; the same command continues")

    for number in usual:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
