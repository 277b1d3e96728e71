"""What a worker does for a request: train a run, or estimate how long it will take."""

import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from hyena_jax import config
from hyena_jax.config import DataConfig, Experiment, UserError, require
from hyena_jax.data import dataset
from hyena_jax.data.dataset import Dataset, Encoding, Stream, iterate
from hyena_jax.output import Output
from hyena_jax.parallel.strategy import round_up
from hyena_jax.signals import Interrupted
from hyena_jax.sweeps.worker import DIVERGED, DONE, FAILED, PLAN, PLANNED, STEP, Request
from hyena_jax.training.console import Progress
from hyena_jax.training.loop import Diverged, Setup, mapped_eval_step, mapped_train_step
from hyena_jax.training.run import load, prepare, train
from hyena_jax.training.start import start

STEPS_EVERY = 0.5
"""Least seconds between two events about steps."""
TIMED = 3
"""Steps after the first that an estimate measures; their median counts."""


class Server:
    """Serves requests, and keeps the data of the last one for the next.

    `send(kind, **values)` sends an event.
    """

    def __init__(self, send: Callable[..., None]):
        self._send = send
        self._plugins: set[str] = set()
        self._kept: tuple[DataConfig, Encoding | None, Dataset] | None = None

    def serve(self, request: Request) -> bool:
        """Returns False once this process was asked to stop; what else went wrong is sent."""
        try:
            experiment, workdir = self._experiment(request.config), Path(request.workdir)
            init_from = None if request.init_from is None else Path(request.init_from)
            if request.kind == PLAN:
                loaded = load(experiment, self._load, workdir, init_from)
                setup = prepare(*loaded, Console(quiet=True), workdir, init_from)
                self._send(PLANNED, seconds=_estimated_seconds(setup))
            else:
                _print_to(f"{workdir}.log")
                train(
                    experiment,
                    workdir,
                    Output(width=110),
                    init_from=init_from,
                    load_data=self._load,
                    make_progress=partial(_SentProgress, send=self._send),
                )
                self._send(DONE)
        except Diverged as error:
            self._send(DIVERGED, error=str(error))
        except Interrupted:
            return False
        except UserError as error:
            self._send(FAILED, error=error.message, argument=error.argument)
        except OSError as error:
            self._send(FAILED, error=str(error))
        except Exception as error:  # the other runs may not have its fault
            traceback.print_exc()
            self._send(FAILED, error=config.describe_fault(error))
        finally:
            sys.stdout.flush()
            jax.clear_caches()  # the next run's functions are others
        return True

    def _experiment(self, encoded: dict[str, Any]) -> Experiment:
        """The experiment; each plugin is imported once, so that its classes stay the same."""
        for name in encoded.get("plugins", {}):
            require(name != "", "the file of your plugin", name, "a Python file or a module, for a sweep")
            if name not in self._plugins:
                config.load_plugin(name)
                self._plugins.add(name)
        return config.decode(encoded)

    def _load(self, data: DataConfig, encoding: Encoding | None) -> Dataset:
        """`dataset.load`, or the data of the run before if they are the same."""
        if self._kept is not None and self._kept[:2] == (data, encoding):
            return self._kept[2]
        loaded = dataset.load(data, encoding)
        reads_once = isinstance(loaded.train_batches(data.batch_size, 0), Stream)
        self._kept = None if reads_once else (data, encoding, loaded)
        return loaded


class _SentProgress(Progress):
    """Prints rows of text, and sends the number of the last step."""

    def __init__(self, console: Console, start: int, steps: int, unit: str, send: Callable[..., None]):
        super().__init__(console, start, steps, unit)
        self._send, self._sent = send, 0.0

    def advance(self, step: int) -> None:
        super().advance(step)
        now = time.monotonic()
        if now - self._sent >= STEPS_EVERY:
            self._sent = now
            self._send(STEP, step=step)


def _print_to(path: str) -> None:
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
    state, eval_step = start(setup), mapped_eval_step(setup)
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
