"""Scalars for TensorBoard."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

FLUSH_EVERY = 30.0
"""Seconds after which a row also flushes the file."""


class EventFile:
    """An event file; each start of a run writes its own.

    Rows are written by the thread that logs them. The SummaryWriter of tensorboardX has a thread for this,
    which dies unnoticed on a full disk, and then its queue blocks the training forever.
    """

    def __init__(self, folder: Path, first_step: int):
        """Makes the folder; TensorBoard then drops rows of earlier files from `first_step` on."""
        folder.mkdir(exist_ok=True)
        # The usual name holds seconds only, which two starts may share.
        self._file = EventsWriter(str(folder / "events"), f".{time.time_ns() % 10**9:09d}")
        self._flushed = time.monotonic()
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a row of scalars."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=Summary(value=scalars))
        if time.monotonic() - self._flushed > FLUSH_EVERY:
            self.sync()

    def sync(self) -> None:
        """Flushes, so that written rows survive a crash of the machine."""
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._file.close()

    def _write(self, **content: object) -> None:
        self._file.write_event(Event(wall_time=time.time(), **content))
