"""What a worker does for a request: train a run, or estimate how long it will take."""

import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from hyena_jax import config
from hyena_jax.config import DataConfig, Experiment
from hyena_jax.data import dataset
from hyena_jax.data.dataset import Dataset, Encoding, Stream, iterate
from hyena_jax.parallel.strategy import round_up
from hyena_jax.sweeps.pool import DIVERGED, DONE, FAILED, FREE, PLAN, PLANNED, STEP, RunRequest
from hyena_jax.system.errors import UserError, describe_fault, require
from hyena_jax.system.output import Output
from hyena_jax.system.signals import Interrupted
from hyena_jax.system.storage.mirror import fetch, opened, share
from hyena_jax.training.hooks import Diverged, Hook, LiveRun, Now, standard_hooks
from hyena_jax.training.options import StartOptions
from hyena_jax.training.run import initial_state, train
from hyena_jax.training.setup import Setup, make_setup, mapped_eval_step, mapped_train_step
from hyena_jax.training.together import Job, train_together

STEPS_EVERY = 0.5
"""Least seconds between two events about steps."""
TIMED = 3
"""Steps after the first that an estimate measures; their median counts."""
FREED_EVERY = 8
"""Requests after which compiled functions are freed: a run of one small block leaves 16 MiB of them, and
without JAX's own the next run starts later."""


class Server:
    """Serves requests, and keeps the data of the last for the next; `send(kind, **values)` sends an event."""

    def __init__(self, send: Callable[..., None]):
        self._send = send
        self._plugins: set[str] = set()
        self._kept: tuple[DataConfig, Encoding | None, Dataset] | None = None
        self._n_served = 0

    def serve(self, request: RunRequest) -> bool:
        """Returns False once this process was asked to stop; what else went wrong is sent."""
        try:
            if request.others:
                self._train_together((request, *request.others))
                return True
            experiment, workdir = self._experiment(request.config), opened(request.workdir)
            options = _options(request)
            if request.kind == PLAN:
                setup = make_setup(experiment, Console(quiet=True), workdir, options, self._load)
                self._send(PLANNED, seconds=_estimated_seconds(setup))
            else:
                log = Path(f"{workdir}.log")
                fetch(log)
                _print_to(log)
                try:
                    hooks = partial(_hooks, send=self._send)
                    train(experiment, workdir, Output(width=110), options, self._load, hooks)
                finally:
                    sys.stdout.flush()
                    share(log)
                self._send(DONE)
        except Interrupted:
            return False
        except Exception as error:  # the other runs may not have its fault
            _send_error(self._send, error)
        finally:
            sys.stdout.flush()
            self._n_served += 1
            if self._n_served % FREED_EVERY == 0:
                jax.clear_caches()
        return True

    def _train_together(self, requests: tuple[RunRequest, ...]) -> None:
        """Trains runs in one program; each prints to its own log."""
        with ExitStack() as at_end:
            runs = {}
            for request in requests:
                workdir = opened(request.workdir)
                log = Path(f"{workdir}.log")
                fetch(log)
                if not runs:
                    _print_to(log)
                at_end.callback(share, log)
                runs[workdir.name] = Job(
                    self._experiment(request.config),
                    workdir,
                    Output(width=110, file=at_end.enter_context(open(log, "a", buffering=1))),
                    _options(request),
                    self._load,
                    partial(_hooks, send=partial(self._send, run=workdir.name)),
                )

            def report(name: str, error: Exception | None) -> None:
                send = partial(self._send, run=name)
                send(DONE) if error is None else _send_error(send, error)

            train_together(runs, report)
        self._send(FREE)

    def _experiment(self, encoded: dict[str, Any]) -> Experiment:
        """The experiment; each plugin is imported once, so that its classes stay the same."""
        for name in encoded.get("plugins", {}):
            require(name != "", "the file of your plugin", name, "a Python file or a module, for a sweep")
            if name not in self._plugins:
                config.load_plugin(name)
                self._plugins.add(name)
        return config.decode(encoded)

    def _load(self, data: DataConfig, encoding: Encoding | None) -> Dataset:
        if self._kept is not None and self._kept[:2] == (data, encoding):
            return self._kept[2]
        loaded = dataset.load(data, encoding)
        reads_once = isinstance(loaded.train_batches(data.batch_size, 0), Stream)
        self._kept = None if reads_once else (data, encoding, loaded)
        return loaded


def _options(request: RunRequest) -> StartOptions:
    return StartOptions(init_from=request.init_from and opened(request.init_from, "init_from"))


def _hooks(run: LiveRun, send: Callable[..., None]) -> list[Hook]:
    sent = 0.0

    def send_step(now: Now) -> None:
        nonlocal sent
        if time.monotonic() - sent >= STEPS_EVERY:
            sent = time.monotonic()
            send(STEP, step=now.step)

    return [*standard_hooks(run), send_step]


def _send_error(send: Callable[..., None], error: Exception) -> None:
    match error:
        case Diverged():
            send(DIVERGED, error=str(error))
        case UserError():
            send(FAILED, error=error.message, argument=error.argument)
        case OSError():
            send(FAILED, error=str(error))
        case _:
            traceback.print_exception(error)
            send(FAILED, error=describe_fault(error))


def _print_to(path: Path) -> None:
    """Appends all that this process prints to that file, also what XLA prints if it aborts."""
    sys.stdout.flush()
    with open(path, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _estimated_seconds(setup: Setup) -> float | None:
    """The seconds that training takes in all: compilation, steps and evaluations, without writing files.

    None for data that can only be read once, in their order.
    """
    experiment, strategy, data = setup.experiment, setup.strategy, setup.data
    training = experiment.training
    begun = time.perf_counter()
    batches = data.train_batches(experiment.data.batch_size, experiment.seed, *strategy.row_shard)
    if isinstance(batches, Stream):  # reading it would take rows from the run
        return None
    state, eval_step = initial_state(setup), mapped_eval_step(setup)
    train_step = mapped_train_step(setup, state)
    with closing(iterate(batches)) as rows:
        batch = strategy.place_batch(next(rows)[1])
    n_rows = data.n_eval_rows(training.eval_windows)
    size = round_up(min(training.eval_batch_size, n_rows), strategy.row_shards)
    held_out = strategy.place_batch(strategy.row_shard.of(next(data.eval_batches(size, n_rows))))
    state, _ = train_step(state, batch)
    jax.block_until_ready((state, eval_step(state.model_params, held_out)))
    start_up = time.perf_counter() - begun
    steps, evaluations = [], []
    for _ in range(TIMED):
        (state, _), seconds = _timed(train_step, state, batch)
        steps.append(seconds)
        evaluations.append(_timed(eval_step, state.model_params, held_out)[1])
    n_evaluations = math.ceil(training.steps / training.eval_every) * math.ceil(n_rows / size)
    per_step, per_batch = statistics.median(steps), statistics.median(evaluations)
    return start_up + training.steps * per_step + n_evaluations * per_batch


def _timed(function: Callable, *arguments: Any) -> tuple[Any, float]:
    begun = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    return result, time.perf_counter() - begun
