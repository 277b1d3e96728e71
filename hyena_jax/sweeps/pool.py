"""The worker processes of a sweep: started, given work, watched and ended."""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

from hyena_jax.config import UserError
from hyena_jax.signals import PATIENCE, STOPPING
from hyena_jax.sweeps.worker import FAILED, READY, STEP, STOPPED

POLL_EVERY = 0.2
"""Seconds to wait for an event before looking at signals."""
ENDED = "ended"
"""Kind of an event: the worker ended while it worked."""
INSIDE = "HYENA_JAX_SWEEP_WORKER"
"""Environment variable of workers, where a sweep of their own is refused."""


class Event(NamedTuple):
    """What a worker says about the piece of work that it was given."""

    work: str
    kind: str
    seconds: float
    """Since the work was given, over all workers that had it."""
    values: dict[str, Any]


class _Worker:
    """One process; `work` is the name of what it does, None while it waits."""

    def __init__(self, cores: str, held: Sequence[int]):
        self.cores, self.work, self.began = cores, None, 0.0
        self.is_ready = self.has_stopped = False
        self._rest, self._errors = b"", tempfile.TemporaryFile()  # noqa: SIM115 (see `close`)
        command = [sys.executable, "-m", "hyena_jax.sweeps.worker", cores]
        usual = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until it has its own handlers
        try:
            # In its own group, or Ctrl-C would reach it twice: from the terminal and from here.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                pass_fds=held,
                process_group=0,
                env={**os.environ, INSIDE: "1"},
            )
        except BaseException:
            self._errors.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, usual)

    def ask(self, work: str, request: dict[str, Any]) -> None:
        self.work, self.began = work, time.monotonic()
        with suppress(BrokenPipeError):  # it has ended, which its next event will say
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> Iterator[dict[str, Any]]:
        """The events that have arrived; the last is ENDED if there will be no more."""
        received = os.read(self.process.stdout.fileno(), 2**16)
        *lines, self._rest = (self._rest + received).split(b"\n")
        yield from map(json.loads, lines)
        if not received:
            code = self.process.wait()
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            # Once it trains, it prints to the log of the run.
            more = f"; {self.work}.log may say why" if self.is_ready else f": {said[-1]}" if said else ""
            yield {"kind": ENDED, "error": f"its process {how}{more}"}

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self._errors):
            with suppress(BrokenPipeError):
                file.close()


class Pool:
    """Workers that each do one piece of work at a time; a context manager."""

    def __init__(self, cores: Sequence[str], held: Sequence[int]):
        """`cores` are the CPUs of each worker, as `worker.main` takes them; workers inherit `held` files."""
        self._cores, self._held = cores, held
        self._selector = selectors.DefaultSelector()

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
        for worker in self._workers:  # one that waits has nothing to save
            worker.close()
        self._selector.close()

    def run(self, work: Iterable[tuple[str, dict[str, Any]]], asked: Sequence[int]) -> Iterator[Event]:
        """Gives each piece of work, a name and a request, to a worker that is free; yields what they say.

        A worker that ends while it works, because it was killed or crashed, is replaced.

        Args:
          asked: signals that ask to stop, also while this runs: no more work is given, and workers stop and
            save; a second SIGINT ends them at once.

        Raises:
          UserError: if JAX cannot start.
          OSError: if a worker ends while it starts.
        """
        waiting, given, is_stopping = deque(work), {}, False
        spent: dict[str, float] = {}  # seconds of workers that somebody else stopped
        while True:
            if asked and not is_stopping:
                is_stopping = True
                waiting.clear()
                for worker in self._busy():
                    worker.process.send_signal(signal.SIGTERM)
            for worker in self._workers:
                if waiting and worker.work is None:
                    name, request = waiting.popleft()
                    given[name] = request
                    worker.ask(name, request)
            if not self._busy() or list(asked).count(signal.SIGINT) > 1:
                return
            for key, _ in self._selector.select(POLL_EVERY):
                for event in self._events(key.data, is_stopping):
                    event = event._replace(seconds=event.seconds + spent.get(event.work, 0.0))
                    if event.kind == STOPPED and not is_stopping:  # asked by somebody else: another continues
                        spent[event.work] = event.seconds
                        waiting.appendleft((event.work, given[event.work]))
                    else:
                        yield event

    @property
    def _workers(self) -> list[_Worker]:
        return [key.data for key in self._selector.get_map().values()]

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.work is not None]

    def _start(self, cores: str) -> None:
        worker = _Worker(cores, self._held)
        self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)

    def _events(self, worker: _Worker, is_stopping: bool) -> Iterator[Event]:
        for values in worker.read():
            kind, work, seconds = values.pop("kind"), worker.work, time.monotonic() - worker.began
            if kind == READY:
                worker.is_ready = True
                continue
            if kind == FAILED and not worker.is_ready:
                raise UserError(values["error"], values["argument"])
            if kind == STOPPED:  # said again below, once it has ended
                worker.has_stopped = True
                continue
            if kind == ENDED:
                self._selector.unregister(worker.process.stdout)
                worker.close()
                if not worker.is_ready and not is_stopping:
                    raise OSError(f"a worker could not start: {values['error']}")
                if not is_stopping:
                    self._start(worker.cores)
                if worker.has_stopped or is_stopping:
                    kind, values = STOPPED, {}
            if kind != STEP:
                worker.work = None
            if work is not None:
                yield Event(work, kind, seconds, values)
