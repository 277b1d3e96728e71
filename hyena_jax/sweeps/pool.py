"""The worker processes of a sweep: started, given work, watched and ended."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any, NamedTuple

from hyena_jax.system.errors import UserError, require
from hyena_jax.system.signals import PATIENCE, STOPPED_CODE, how_ended, start_process

# Kinds of requests, and of events.
PLAN, TRAIN = "plan", "train"
READY, STEP, PLANNED, DONE = "ready", "step", "planned", "done"
DIVERGED, FAILED, FREE = "diverged", "failed", "free"
"""FREE: the worker has trained several runs together, and has said how each ended."""
POLL_EVERY = 0.2
"""Seconds to wait for an event before looking at signals."""
STOPPED, ENDED = "stopped", "ended"
"""Kinds of events: the worker was asked to stop, and ended; it ended for another reason while it worked."""
INSIDE = "HYENA_JAX_SWEEP_WORKER"
"""Environment variable of workers, where a sweep of their own is refused."""


class RunRequest(NamedTuple):
    """What a worker is asked to do."""

    kind: str
    """PLAN: to estimate how long the run will take; TRAIN."""
    config: dict[str, Any]
    """The encoded experiment."""
    workdir: str
    """The run folder, or its URL; what training prints goes to `{workdir}.log`."""
    init_from: str | None
    """See `StartOptions`."""
    others: "tuple[RunRequest, ...]" = ()
    """Further runs, to be trained together with this one. Events then have a value `run`, its name, and FREE
    follows the last."""


class Event(NamedTuple):
    """What a worker says about the piece of work that it was given."""

    work: str
    kind: str
    seconds: float
    """Since the work was given, over all workers that had it."""
    values: dict[str, Any]


class ThisMachine:
    """Trains the runs of a sweep in processes on this machine, each on an equal part of the CPUs."""

    def __init__(self, jobs: int = 1):
        """`jobs` are the runs that are trained at the same time."""
        self._cores = _divided_cores(jobs)
        self.n_workers = len(self._cores)

    def pool(self, n_runs: int, lock: int) -> "Pool":
        """The workers for that many runs. They hold the lock on the sweep's folder too: one that outlives a
        killed sweep, to save, keeps it."""
        return Pool(self._cores[:n_runs], [lock])


class _Worker:
    """One process; `work` is the name of what it does, None while it waits."""

    def __init__(self, cores: str, held: Sequence[int]):
        self.cores, self.work, self.began, self.is_ready = cores, None, 0.0, False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (see `close`)
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", "hyena_jax.sweeps.worker", str(theirs.fileno()), cores]
        try:
            self.process = start_process(
                command,
                stdin=subprocess.PIPE,  # nothing is ever written: its end tells that this process is gone
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno(), *held],
                env={**os.environ, INSIDE: "1"},
            )
        except BaseException:
            self._errors.close()
            self.connection.close()
            raise
        finally:
            theirs.close()

    def ask(self, work: str, request: Any) -> None:
        self.work, self.began = work, time.monotonic()
        with suppress(ConnectionError):  # it has ended, which its next event will say
            self.connection.send(request)

    def receive(self) -> tuple[str, dict[str, Any]]:
        """The next event; STOPPED or ENDED if there will be no more."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):  # OSError: it was killed within an event
            code = self.process.wait()
        if code == STOPPED_CODE:
            return STOPPED, {}
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        # Once it trains, it prints to the log of the run.
        more = f"; {self.work}.log may say why" if self.is_ready else f": {said[-1]}" if said else ""
        return ENDED, {"error": f"its process {how_ended(code)}{more}"}

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.connection, self._errors):
            file.close()


class Pool:
    """Workers that each do one piece of work at a time; a context manager. After an error, runs are saved."""

    def __init__(self, cores: Sequence[str], held: Sequence[int]):
        """`cores` are the CPUs of each worker, as `worker.main` takes them; workers inherit `held` files."""
        self._cores, self._held = cores, held
        self._workers: dict[Connection, _Worker] = {}

    def __enter__(self) -> "Pool":
        for cores in self._cores:
            self._start(cores)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        busy = self._busy() if error is not None else []  # such as a closed pipe: runs are saved all the same
        for worker in busy:
            worker.process.send_signal(signal.SIGTERM)
        for worker in busy:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(PATIENCE)
        for worker in self._workers.values():  # one that waits has nothing to save
            worker.close()

    def run(self, work: Iterable[tuple[str, Any]], asked: Sequence[int]) -> Iterator[Event]:
        """Gives each piece of work, a name and a request, to a worker that is free; yields what they say.

        A worker that ends while it works, because it was killed or crashed, is replaced. `asked` are signals
        that ask to stop, also while this runs: no more work is given, and workers stop and save; a second
        SIGINT ends them at once. UserError if JAX cannot start; OSError if a worker ends while it starts.
        """
        waiting, given, is_stopping = deque(work), {}, False
        spent: dict[str, float] = {}  # seconds of workers that somebody else stopped
        while True:
            if asked and not is_stopping:
                is_stopping = True
                waiting.clear()
                for worker in self._busy():
                    worker.process.send_signal(signal.SIGTERM)
            for worker in self._workers.values():
                if waiting and worker.work is None:
                    name, request = waiting.popleft()
                    given[name] = request
                    worker.ask(name, request)
            if not self._busy() or list(asked).count(signal.SIGINT) > 1:
                return
            for connection in wait(self._workers, POLL_EVERY):
                event = self._event(self._workers[connection], is_stopping)
                if event is None:
                    continue
                event = event._replace(seconds=event.seconds + spent.get(event.work, 0.0))
                if event.kind == STOPPED and not is_stopping:  # asked by somebody else: another continues
                    spent[event.work] = event.seconds
                    waiting.appendleft((event.work, given[event.work]))
                else:
                    yield event

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.work is not None]

    def _start(self, cores: str) -> None:
        worker = _Worker(cores, self._held)
        self._workers[worker.connection] = worker

    def _event(self, worker: _Worker, is_stopping: bool) -> Event | None:
        """The next event of a worker, if it is about its work; replaces a worker that has ended."""
        kind, values = worker.receive()
        work, seconds = worker.work, time.monotonic() - worker.began
        if kind == READY:
            worker.is_ready = True
            return None
        if kind == FAILED and not worker.is_ready:
            raise UserError(values["error"], values["argument"])
        if kind in (STOPPED, ENDED):
            del self._workers[worker.connection]
            worker.close()
            if kind == ENDED and not worker.is_ready and not is_stopping:
                raise OSError(f"a worker could not start: {values['error']}")
            if is_stopping:
                kind, values = STOPPED, {}
            else:
                self._start(worker.cores)
        if kind != STEP and "run" not in values:
            worker.work = None
        return None if work is None else Event(values.get("run", work), kind, seconds, values)


def _divided_cores(jobs: int) -> list[str]:
    """The CPUs of each worker; all of them, as an empty text, for a single one."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    most = max(1, len(cores))
    require(1 <= jobs <= most, "jobs", jobs, f"in 1..{most}, the number of CPUs")
    if jobs == 1:
        return [""]
    size = len(cores) // jobs
    return [",".join(map(str, cores[i * size : (i + 1) * size])) for i in range(jobs)]
