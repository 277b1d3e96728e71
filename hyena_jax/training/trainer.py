"""The steps of a run: train, log, evaluate and save until done or told to stop."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hyena_jax.config import Experiment, UserError
from hyena_jax.data import loader
from hyena_jax.data.dataset import Dataset
from hyena_jax.parallel.processes import first_request
from hyena_jax.parallel.replicas import check_replicas
from hyena_jax.parallel.strategy import Strategy
from hyena_jax.training.checkpoint import Checkpoints
from hyena_jax.training.evaluate import held_out_values, sum_held_out
from hyena_jax.training.metrics import MetricsLog, NoLog
from hyena_jax.training.optimizer import global_norm
from hyena_jax.training.profiling import Profile
from hyena_jax.training.progress import Progress
from hyena_jax.training.schedules import make_schedule
from hyena_jax.training.signals import StopRequest
from hyena_jax.training.step import FINITE, Metrics, TrainState


class Diverged(Exception):
    """The loss or a gradient is not finite; nothing was saved since."""


@dataclass
class Trainer:
    """The loop and what it writes to."""

    experiment: Experiment
    data: Dataset
    strategy: Strategy
    train_step: Callable
    eval_step: Callable
    checkpoints: Checkpoints
    log: MetricsLog | NoLog
    progress: Progress
    best_loss: float
    data_state: Any
    """Where the last checkpoint left data that are a `loader.Stream`; None where there is none."""
    clock: "Clock" = field(init=False)
    schedule: optax.Schedule = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.experiment.data.batch_size * self.data.units_per_row)
        self.schedule = make_schedule(self.experiment.optimizer, self.experiment.training.steps)

    def run(self, state: TrainState, start: int, stop: StopRequest, profile: Profile) -> optax.Params:
        """Trains from step `start` on until done or asked to stop; returns the parameters then."""
        training = self.experiment.training
        rows, batch_size = self.strategy.row_shard, self.experiment.data.batch_size
        dataset = self.data.train_batches(batch_size, self.experiment.seed, *rows)
        stream = dataset if isinstance(dataset, loader.Stream) else None
        if stream is not None and start > 0:
            stream.restore(self.data_state)
        check_every = self.experiment.parallel.check_replicas_every
        step, saved, stopping = start, start, False
        with closing(loader.iterate(dataset, start)) as batches:
            while step < training.steps and not stopping:
                try:
                    t, batch = next(batches)
                except loader.DataEnded as error:
                    if step > saved:
                        self._save(step, state, None, stream)
                    raise UserError(
                        f"{error}, before training.steps={training.steps}; what was trained is saved: lower"
                        " training.steps, or give an iterator that begins again"
                    ) from error
                profile.before_step(t)
                state, metrics = self.train_step(state, self.strategy.place_batch(batch))
                step = t + 1
                if step == start + 1:
                    jax.block_until_ready(state)  # keep compilation out of the speed that is reported
                    self.clock.restart(step)
                    stop.defer()  # from here on there is something to save
                is_last = step == training.steps
                if check_every is not None and step % check_every == 0:
                    check_replicas(self.strategy.to_global(state), step)
                if step % training.log_every == 0 or is_last:
                    self._log_training(step, state, metrics)
                loss = None
                if step % training.eval_every == 0 or is_last:
                    loss = self._evaluate(step, state)
                is_best = loss is not None and loss < self.best_loss
                stopping = self._is_stopping(step, stop)  # read once: a signal that comes later waits
                if step % training.checkpoint_every == 0 or is_best or is_last or stopping:
                    self._save(step, state, loss, stream)
                    saved = step
                self.progress.advance(step)
        return self.strategy.host_copy(state.params)

    def _is_stopping(self, step: int, stop: StopRequest) -> bool:
        """Whether to stop after this step: of several processes all, if one was asked to."""
        if jax.process_count() > 1:
            agree = step % self.experiment.parallel.stop_every == 0
            stop.name = first_request(stop.name) if agree else stop.name
            return agree and stop.is_set
        return stop.is_set

    def _log_training(self, step: int, state: TrainState, metrics: Metrics) -> None:
        values = {name: value.item() for name, value in metrics.items()}
        self._check_finite(values.pop("bad_step"))
        speed = self.clock.units_per_second(step)
        row = {
            **values,
            **(self.data.loss_metrics(values["loss"]) if self.experiment.loss.in_nats else {}),
            "param_norm": param_norm(state.params).item(),
            "learning_rate": float(self.schedule(step - 1)),
            f"{self.data.unit}s_per_second": speed,
        }
        self.log.write(step, {f"train/{name}": value for name, value in row.items()})
        self.progress.training(step, values["loss"], speed)

    def _evaluate(self, step: int, state: TrainState) -> float:
        training = self.experiment.training
        jax.block_until_ready(state)  # the steps still under way are training time
        with self.clock.paused(), self.progress.evaluating():
            sums = sum_held_out(
                self.strategy,
                self.eval_step,
                state.params,
                self.data,
                training.eval_batch_size,
                training.eval_windows,
            )
        values = held_out_values(self.data, sums)
        if not math.isfinite(values["loss"]):
            raise _diverged(f"the validation loss at step {step} is {values['loss']}")
        self.log.write(step, {f"validation/{name}": value for name, value in values.items()})
        self.progress.validation(step, values["loss"])
        return values["loss"]

    def _save(
        self,
        step: int,
        state: TrainState,
        loss: float | None,
        stream: loader.Stream | None,
    ) -> None:
        jax.block_until_ready(state)
        with self.clock.paused():
            self._check_finite(state.bad_step.item())
            if not all_finite(state.params):
                raise _diverged(f"a parameter is not finite after step {step}")
            self.log.sync()
            items = self.strategy.to_global(state).to_items()
            meta = {"step": step, "loss": loss}
            if stream is not None:
                meta["data_state"] = stream.state()
            self.checkpoints.save(step, items, meta)
        if loss is not None:
            self.best_loss = min(loss, self.best_loss)

    def _check_finite(self, bad_step: int) -> None:
        if bad_step != FINITE:
            raise _diverged(f"the loss or a gradient was not finite at step {bad_step}")


def _diverged(what: str) -> Diverged:
    return Diverged(
        f"{what}; nothing was saved since. Try a lower optimizer.learning_rate, a longer warm-up, "
        "gradients clipped at a lower norm, or model.dtype float32, in a new workdir"
    )


# Apart from the step: only the steps that are logged need it.
param_norm = jax.jit(global_norm)


@jax.jit
def all_finite(params: optax.Params) -> jax.Array:
    """Whether every entry is finite, bool []."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()


class Clock:
    """Training speed, without the time that evaluation and saving take."""

    def __init__(self, units_per_step: int):
        self._units_per_step = units_per_step
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begins a new interval after `step`."""
        self._step, self._start = step, time.perf_counter()

    def units_per_second(self, step: int) -> float:
        """The speed since the interval began; begins a new one."""
        units = (step - self._step) * self._units_per_step
        speed = units / (time.perf_counter() - self._start)
        self.restart(step)
        return speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in this context does not count."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - began
