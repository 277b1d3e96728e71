"""The workers of a sweep on a Ray cluster: an actor for each, which starts the usual worker process there."""

import importlib.metadata
import os
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hyena_jax.sweeps.pool import ENDED, POLL_EVERY, STOPPED, Event, Pool, RunRequest
from hyena_jax.system.errors import UserError, choose, require
from hyena_jax.system.files import LOCK, locked
from hyena_jax.system.signals import PATIENCE
from hyena_jax.system.storage.bucket import Bucket
from hyena_jax.system.storage.lease import Lease
from hyena_jax.system.storage.location import Location, is_url

MAX_LOSSES = 3
"""A run that loses its machine this often has failed: it may be what ends them."""
PACKAGES = ("hyena_jax", "jax", "jaxlib")


class RayCluster:
    """Trains the runs of a sweep on a Ray cluster, which somebody else has started: see `sweep`.

    The folder of the sweep must be in a bucket, or one that all its machines see, under the same path.
    """

    def __init__(self, address: str = "auto", jobs: int = 1, resources: Mapping[str, float] | None = None):
        """Connects to the cluster, unless this process is connected to one.

        Args:
          address: of its head, as `ray.init` takes it; `auto` finds the one of this machine.
          jobs: runs that are trained at the same time, where the cluster has room for them.
          resources: what Ray reserves for each run, such as {"GPU": 1} or {"TPU": 4}; None: {"CPU": 1}.

        Raises:
          UserError: if Ray is not installed, no cluster answers, or no machine of it has the resources.
        """
        require(jobs >= 1, "jobs", jobs, "at least 1")
        self.n_workers = jobs
        self._resources = {"CPU": 1.0} if resources is None else dict(resources)
        for name, amount in self._resources.items():
            require(amount > 0, "per_run", f"{name}={amount:g}", "of positive amounts")
        try:
            import ray
        except ImportError as error:
            raise UserError("engine 'ray' needs the extra ray: pip install 'hyena_jax[ray]'") from error
        self._joins = not ray.is_initialized()
        if self._joins:
            usual = signal.getsignal(signal.SIGTERM)
            try:
                ray.init(address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError, OSError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                allowed = f"the address of a running Ray cluster (`ray start --head` starts one): {reason}"
                raise UserError(f"must be {allowed}, got {address!r}", "address") from error
            finally:  # which Ray replaces
                with suppress(ValueError):  # not the main thread
                    signal.signal(signal.SIGTERM, usual)
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        known = {name for machine in machines for name in machine if ":" not in name}
        for name in self._resources:
            choose("resource of the cluster", name, dict.fromkeys(sorted(known)))
        fits = any(all(m.get(k, 0) >= v for k, v in self._resources.items()) for m in machines)
        shown = ",".join(f"{name}={amount:g}" for name, amount in self._resources.items())
        require(fits, "per_run", shown, f"at most what one of the {len(machines)} machines has")

    def pool(self, n_runs: int, lock: int) -> "RayPool":
        """The workers for that many runs; the lock stays with this process."""
        return RayPool(min(n_runs, self.n_workers), self._resources, self._joins)


class Machine:
    """An actor: runs one worker process on its machine, and passes on its events."""

    def __init__(self) -> None:
        self._asked: list[int] = []
        self._pool = Pool([""], [])

    def start(self, folder: str, versions: Mapping[str, str]) -> None:
        """Starts the worker, in the working `folder` where the machine has it: relative paths refer to it.

        `versions` are of packages, as they must be here too.
        """
        found = _versions()
        must = f"the same on all machines of the cluster: {found} on {socket.gethostname()}"
        require(found == versions, "versions", versions, must)
        with suppress(OSError):
            os.chdir(folder)
        self._pool.__enter__()

    def train(self, work: str, request: RunRequest) -> Iterator[Event]:
        """Yields the events of one piece of work."""
        if is_url(request.workdir):
            bucket = Bucket(Location.parse(request.workdir, "workdir"))
            _wait_until_free(lambda: Lease(bucket, lambda line: None))
        else:
            workdir = Path(request.workdir)
            if not (workdir.parent / LOCK).exists():
                where = f"a folder that all machines of the cluster see; {socket.gethostname()} does not"
                raise UserError(f"must be {where}, got {str(workdir.parent)!r}", "workdir")
            if (workdir / LOCK).exists():
                _wait_until_free(lambda: locked(workdir))
        yield from self._pool.run([(work, request)], self._asked)

    def stop(self, number: int) -> None:
        """Passes on a signal that asks to stop."""
        self._asked.append(number)


def parse_resources(texts: Sequence[str]) -> dict[str, float] | None:
    """The resources of `NAME=AMOUNT` texts, which are checked; None if there are none."""
    found = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            raise UserError(f"must be NAME=AMOUNT, such as GPU=1, got {text!r}", "per_run") from None
    return found or None


def _versions() -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in PACKAGES}


def _wait_until_free(lock: Callable[[], AbstractContextManager[Any]]) -> None:
    """Waits while the worker of an actor that is gone still saves, and holds the run's lock."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with suppress(UserError, OSError), lock():
            return
        time.sleep(POLL_EVERY)


class _Worker:
    """An actor, its work, and the events that are still to come: None while it starts or waits."""

    def __init__(self, make: Any):
        self.actor = make()
        self.starting: Any = self.actor.start.remote(os.getcwd(), _versions())
        self.work: str | None = None
        self.events: Any = None
        self.began = 0.0

    @property
    def pending(self) -> Any:
        return self.starting if self.starting is not None else self.events

    def ask(self, work: str, request: Any) -> None:
        self.work, self.began = work, time.monotonic()
        self.events = self.actor.train.remote(work, request)


class RayPool:
    """Like `Pool`, of actors; one whose machine is gone is replaced, and another one continues its run."""

    def __init__(self, n_workers: int, resources: Mapping[str, float], joins: bool):
        import ray

        named = {"CPU": "num_cpus", "GPU": "num_gpus"}
        options = {named[name]: amount for name, amount in resources.items() if name in named}
        others = {name: amount for name, amount in resources.items() if name not in named}
        actor = ray.remote(Machine).options(
            **{"num_cpus": 0, **options},
            resources=others,
            max_concurrency=2,  # `stop` while it trains
        )
        self._ray, self._joins, self._n_workers = ray, joins, n_workers
        self._make = actor.remote
        self._workers: list[_Worker] = []

    def __enter__(self) -> "RayPool":
        self._workers = [_Worker(self._make) for _ in range(self._n_workers)]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        busy = self._busy() if error is not None else []
        for worker in busy:
            worker.actor.stop.remote(signal.SIGTERM)
        if busy:  # until they have saved
            done = [worker.events.completed() for worker in busy]
            self._ray.wait(done, num_returns=len(done), timeout=PATIENCE)
        for worker in self._workers:  # whose process stops and saves if it still trains
            self._ray.kill(worker.actor)
        if self._joins:
            self._ray.shutdown()

    def run(self, work: Iterable[tuple[str, Any]], asked: Sequence[int]) -> Iterator[Event]:
        """See `Pool.run`. A run whose machine is lost continues on another one, up to MAX_LOSSES times."""
        waiting, given, is_stopping = deque(work), {}, False
        spent, losses = Counter(), Counter()
        while True:
            if asked and not is_stopping:
                is_stopping = True
                waiting.clear()
                for worker in self._busy():
                    worker.actor.stop.remote(signal.SIGTERM)
            for worker in self._workers:
                if waiting and worker.pending is None:
                    name, request = waiting.popleft()
                    given[name] = request
                    worker.ask(name, request)
            if not (waiting or self._busy()) or list(asked).count(signal.SIGINT) > 1:
                return
            by_pending = {worker.pending: worker for worker in self._workers if worker.pending is not None}
            for ready in self._ray.wait([*by_pending], timeout=POLL_EVERY)[0]:
                worker = by_pending[ready]
                try:
                    event = self._next(worker)
                except self._ray.exceptions.RayActorError as error:
                    name, seconds = worker.work, time.monotonic() - worker.began
                    self._workers[self._workers.index(worker)] = _Worker(self._make)
                    losses[name] += 1
                    if name is None:
                        if losses[None] > MAX_LOSSES:
                            raise OSError(f"workers cannot start on the cluster: {_reason(error)}") from error
                        continue
                    spent[name] += seconds
                    if is_stopping:
                        yield Event(name, STOPPED, spent[name], {})
                    elif losses[name] < MAX_LOSSES:
                        waiting.appendleft((name, given[name]))
                    else:
                        said = f"its machine was lost {MAX_LOSSES} times: {_reason(error)}"
                        yield Event(name, ENDED, spent[name], {"error": said})
                    continue
                if event is not None:
                    yield event._replace(seconds=event.seconds + spent[event.work])

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.work is not None]

    def _next(self, worker: _Worker) -> Event | None:
        """The next event of a worker; None if it has started, or there are no more of its work.

        Raises UserError if it may not work there: see `Machine`; RayActorError if its machine is gone.
        """
        try:
            if worker.starting is not None:
                self._ray.get(worker.starting)
                worker.starting = None
                return None
            try:
                return self._ray.get(next(worker.events))
            except StopIteration:
                worker.work = worker.events = None
                return None
        except self._ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, UserError | OSError) else error) from error


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
