"""Stopping a run in good order."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Set once the process was asked to stop; `name` is the signal's."""

    name: str | None = None

    @property
    def is_set(self) -> bool:
        """Whether a signal came."""
        return self.name is not None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """SIGINT and SIGTERM set the request that is given out; a second one acts as it always does."""
    request = StopRequest()
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        request.name = signal.Signals(number).name
        restore()

    for number in usual:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()
