"""Stopping a run in an orderly way."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hyena_jax.interruption import STOPPING


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and saved; the same call continues it."""


class StopRequest:
    """Set once a signal asks the process to stop, after `defer`; `name` is the name of the signal."""

    name: str | None = None

    def __init__(self, handlers: dict[int, Any]):
        self._usual = handlers

    @property
    def is_set(self) -> bool:
        """Whether a signal came."""
        return self.name is not None

    def defer(self) -> None:
        """From now on signals are only recorded, since there is a step to save."""
        for number in self._usual:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The usual handler is called, not installed: `interruption.watch_signals` would call it at once.
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

    After the first signal, a second Ctrl-C acts as usual. Signals that are ignored stay ignored: SIGHUP under
    nohup, SIGINT in a background job. Python handles signals only in the main thread: in another thread the
    request is never set.
    """
    can_handle = threading.current_thread() is threading.main_thread()
    usual = {number: signal.getsignal(number) for number in STOPPING if can_handle}
    usual = {number: handler for number, handler in usual.items() if handler != signal.SIG_IGN}
    try:
        yield StopRequest(usual)
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
