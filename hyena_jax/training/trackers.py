"""Trackers: services and files that get the rows of a run as they are written, next to `metrics.jsonl`."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from hyena_jax.config import Experiment, TensorBoardConfig, TrackerConfig, own_code
from hyena_jax.system.errors import UserError, describe_fault, require
from hyena_jax.system.files import EVENTS

FLUSH_EVERY = 30.0
"""Seconds after which a row also flushes the event file."""


class Start(NamedTuple):
    """What a tracker is told when a run starts or continues."""

    workdir: Path
    """The run's folder."""
    experiment: Experiment
    """`hyena_jax.config.encode` turns it into JSON values."""
    first_step: int
    """The first step whose rows will follow; 1 for a new run. Rows that an earlier start wrote for it and for
    later steps belong to steps that were lost: they will be repeated, and a tracker drops them if it can."""


class Tracker:
    """Base class of trackers: made from its config and a `Start`, then given each row, and closed at last.

    Only the first of several processes has trackers, and one thread calls them.
    """

    def __init__(self, config: TrackerConfig, start: Start):
        """Opens what is written to; an error refuses a new run before its first step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Gets the values of a row, named `train/loss` or `validation/loss`; some may not be finite.

        Training waits until this returns.
        """
        raise NotImplementedError

    def sync(self) -> None:
        """Flushes, so that written rows survive a crash of the machine; called before each checkpoint."""

    def close(self, failed: bool) -> None:
        """Ends the tracking, after the last checkpoint was written.

        `failed`: whether the run ended by an error; being asked to stop is not one.
        """


class Trackers(Tracker, AbstractContextManager):
    """All trackers of a run, as one; a context manager.

    A run must not be lost because a service fails: a tracker that raises is left out until the next start,
    and one line says so. At the start of a new run, its error is raised instead.
    """

    def __init__(self, start: Start, report: Callable[[str], None]):
        """Starts the trackers of the experiment. OSError if TensorBoard's event file cannot be written."""
        self._report = report
        self._open: dict[str, Tracker] = {}
        for config in start.experiment.logging.all_trackers:
            part = TrackerConfig.registry.part_of(type(config))
            try:
                tracker = TrackerConfig.registry.target(type(config))(config, start)
                what = f"what tracker {part.name!r} makes"
                require(isinstance(tracker, Tracker), what, tracker, "a hyena_jax.training.trackers.Tracker")
                self._open[part.name] = tracker
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                is_machines = isinstance(error, OSError) and part.plugin is None
                fault = f"tracker {part.name!r} cannot start: {describe_fault(error)}"
                if start.first_step > 1 and not is_machines:
                    report(f"{fault}; the run continues without it")
                    continue
                self.close(failed=True)
                if is_machines or isinstance(error, UserError):
                    raise
                raise UserError(fault) from error

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(failed=kind is not None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.write(step, values))

    def sync(self) -> None:
        self._each(lambda tracker: tracker.sync())

    def close(self, failed: bool) -> None:
        while self._open:
            name, tracker = self._open.popitem()
            self._call(name, partial(tracker.close, failed))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            if not self._call(name, partial(call, tracker)):
                del self._open[name]
                with suppress(UserError), own_code(name):
                    tracker.close(failed=True)

    def _call(self, name: str, call: Callable[[], None]) -> bool:
        """Whether the call of a tracker's code succeeds; whatever it raises, only a line says so."""
        try:
            call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # some services' code ends its process
            fault = f"tracker {name!r} failed: {describe_fault(error)}"
            self._report(f"{fault}; the run continues without it, and metrics.jsonl has all rows")
            return False
        return True


class EventFile(Tracker):
    """A TensorBoard event file; each start of a run writes its own.

    The thread that logs rows writes them: tensorboardX's SummaryWriter has its own, which dies unnoticed on a
    full disk, and its queue then blocks the training forever.
    """

    def __init__(self, config: TensorBoardConfig, start: Start):
        """Makes the folder; TensorBoard then drops rows of earlier files from `start.first_step` on."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder = start.workdir / EVENTS
        folder.mkdir(exist_ok=True)
        # The usual name holds seconds only, which two starts may share.
        self._file = EventsWriter(str(folder / "events"), f".{time.time_ns() % 10**9:09d}")
        self._event, self._flushed = Event, time.monotonic()
        self._write(step=start.first_step, session_log={"status": SessionLog.START})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [{"tag": name, "simple_value": value} for name, value in values.items()]
        self._write(step=step, summary={"value": scalars})
        if time.monotonic() - self._flushed > FLUSH_EVERY:
            self.sync()

    def sync(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self, failed: bool) -> None:
        self._file.close()

    def _write(self, **content: object) -> None:
        self._file.write_event(self._event(wall_time=time.time(), **content))
