"""How long a run will take, from a few of its steps."""

import math
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import jax

from hyena_jax.data import loader
from hyena_jax.parallel.strategy import round_up
from hyena_jax.training.loop import Setup, mapped_eval_step, mapped_train_step
from hyena_jax.training.step import init_params, init_state

TIMED = 3
"""Steps after the first; their median counts."""


def seconds_of(setup: Setup) -> float | None:
    """The seconds that training takes in all: compilation, steps and evaluations, without writing files.

    None for data that can only be read once, in their order.
    """
    experiment, strategy, data = setup.experiment, setup.strategy, setup.data
    training = experiment.training
    begun = time.perf_counter()
    params = partial(init_params, setup.model, experiment.seed)
    state = strategy.make_state(lambda: init_state(params(), setup.optimizer))
    train_step, eval_step = mapped_train_step(setup, state), mapped_eval_step(setup)
    batches = data.train_batches(experiment.data.batch_size, experiment.seed, *strategy.row_shard)
    if isinstance(batches, loader.Stream):  # reading it would take rows from the run
        return None
    with closing(loader.iterate(batches)) as rows:
        batch = strategy.place_batch(next(rows)[1])
    n_rows = data.n_eval_rows(training.eval_windows)
    size = round_up(min(training.eval_batch_size, n_rows), strategy.row_shards)
    held_out = strategy.place_batch(strategy.row_shard.of(next(data.eval_batches(size, n_rows))))
    state, _ = train_step(state, batch)
    jax.block_until_ready((state, eval_step(state.params, held_out)))
    start_up = time.perf_counter() - begun
    steps, evaluations = [], []
    for _ in range(TIMED):
        (state, _), seconds = _timed(train_step, state, batch)
        steps.append(seconds)
        evaluations.append(_timed(eval_step, state.params, held_out)[1])
    n_evaluations = math.ceil(training.steps / training.eval_every) * math.ceil(n_rows / size)
    per_step, per_batch = statistics.median(steps), statistics.median(evaluations)
    return start_up + training.steps * per_step + n_evaluations * per_batch


def _timed(function: Callable, *arguments: Any) -> tuple[Any, float]:
    begun = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    return result, time.perf_counter() - begun
