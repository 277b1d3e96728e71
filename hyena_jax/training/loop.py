"""The training loop: restore, then step, log, evaluate, save until done or told to stop."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
from rich.console import Console

from hyena_jax import models
from hyena_jax.config import Experiment, require
from hyena_jax.data import loader
from hyena_jax.data.dataset import Dataset, load
from hyena_jax.training import parallel
from hyena_jax.training.checkpoint import Checkpoints, best
from hyena_jax.training.evaluate import evaluate
from hyena_jax.training.metrics import MetricsLog, draw_learning_curves
from hyena_jax.training.optimizer import global_norm, make_optimizer, make_schedule
from hyena_jax.training.profiling import Profile
from hyena_jax.training.progress import Progress, parameter_table
from hyena_jax.training.run_folder import CHECKPOINTS, locked, open_run
from hyena_jax.training.signals import StopRequest, stop_requests
from hyena_jax.training.step import (
    FINITE,
    Metrics,
    TrainState,
    init_params,
    init_state,
    make_eval_step,
    make_train_step,
)


class Diverged(Exception):
    """The loss or a gradient is not finite; nothing was saved since."""


class Interrupted(Exception):
    """The run was asked to stop, and saved first."""


class Result(NamedTuple):
    """What a finished run leaves in memory."""

    model: nn.Module
    params: optax.Params
    data: Dataset


def train(experiment: Experiment, workdir: Path, console: Console, profile: Path | None = None) -> Result:
    """Trains to `experiment.training.steps`, from the newest checkpoint in `workdir` if there is one.

    All that can be wrong with the input is checked before `workdir` is touched.

    Args:
      profile: folder for a `jax.profiler` trace of a few steps.

    Raises:
      UserError: see `load`, `Dataset.complete`, `make_optimizer`, `open_run` and `Checkpoints.restore`.
      Diverged: if the loss or a gradient is not finite.
      Interrupted: after SIGINT or SIGTERM.
    """
    require(jax.process_count() == 1, "processes", jax.process_count(), "1: several are not supported yet")
    require(profile is None or not profile.is_file(), "profile", str(profile), "a folder, not a file")
    data = load(experiment.data)
    experiment = data.complete(experiment)
    devices = parallel.local_devices(experiment.parallel.devices)
    parallel.check_batch(experiment.data.batch_size, len(devices), experiment.optimizer.accumulation_steps)
    model = models.build(experiment.model)
    params = init_params(model, experiment.seed)
    optimizer = make_optimizer(experiment.optimizer, params, experiment.training.steps)
    changes = open_run(workdir, experiment, data)
    _announce(console, experiment, params, data, devices, changes)
    with ExitStack() as stack:
        stack.enter_context(locked(workdir))
        folder = workdir / CHECKPOINTS
        checkpoints = stack.enter_context(
            Checkpoints(folder, experiment.training.keep_checkpoints, console.print)
        )
        state = _restore(checkpoints, init_state(params, optimizer))
        start = int(state.step)
        if start >= experiment.training.steps:
            console.print(f"already trained to step {start}; a larger --training.steps goes on")
            draw_learning_curves(workdir, data.curves)
            return Result(model, state.params, data)
        if start:
            console.print(f"continuing after step {start}")
        trainer = Trainer(
            experiment=experiment,
            data=data,
            devices=devices,
            train_step=_mapped_train_step(model, optimizer, experiment, devices),
            eval_step=parallel.map_eval_step(make_eval_step(model), devices),
            checkpoints=checkpoints,
            log=stack.enter_context(MetricsLog(workdir, start, experiment.logging.tensorboard)),
            progress=stack.enter_context(Progress(console, start, experiment.training.steps, data.unit)),
            best_loss=best(folder).loss,
        )
        stop = stack.enter_context(stop_requests())
        step, params = trainer.run(
            state, start, stop, stack.enter_context(Profile(profile, start, experiment.training.steps))
        )
    draw_learning_curves(workdir, data.curves)
    if step < experiment.training.steps:
        raise Interrupted(f"stopped by {stop.name} and saved; the same command continues")
    return Result(model, params, data)


@dataclass
class Trainer:
    """The loop and what it writes to."""

    experiment: Experiment
    data: Dataset
    devices: Sequence[jax.Device]
    train_step: Callable
    eval_step: Callable
    checkpoints: Checkpoints
    log: MetricsLog
    progress: Progress
    best_loss: float
    clock: "Clock" = field(init=False)
    schedule: optax.Schedule = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.experiment.data.batch_size * self.data.units_per_row)
        self.schedule = make_schedule(self.experiment.optimizer, self.experiment.training.steps)

    def run(
        self, state: TrainState, start: int, stop: StopRequest, profile: Profile
    ) -> tuple[int, optax.Params]:
        """Trains from step `start` on; returns the last step and the parameters after it."""
        training = self.experiment.training
        dataset = self.data.train_batches(self.experiment.data.batch_size, self.experiment.seed)
        step, stopping = start, False
        state = parallel.replicate(state, self.devices)
        with closing(loader.iterate(dataset, start)) as batches:
            while step < training.steps and not stopping:
                t, batch = next(batches)
                profile.before_step(t)
                state, metrics = self.train_step(state, parallel.split_batch(batch, len(self.devices)))
                step = t + 1
                if step == start + 1:
                    jax.block_until_ready(state)  # keep compilation out of the speed that is reported
                    self.clock.restart(step)
                is_last = step == training.steps
                if step % training.log_every == 0 or is_last:
                    self._log_training(step, state, metrics)
                loss = None
                if step % training.eval_every == 0 or is_last:
                    loss = self._evaluate(step, state)
                is_best = loss is not None and loss < self.best_loss
                stopping = stop.is_set  # read once: a signal that comes later waits for the next step
                if step % training.checkpoint_every == 0 or is_best or is_last or stopping:
                    self._save(step, state, metrics, loss)
                self.progress.advance(step)
        return step, parallel.host_copy(state.params)

    def _log_training(self, step: int, state: TrainState, metrics: Metrics) -> None:
        values = {name: value.item() for name, value in metrics.items()}
        self._check_finite(values.pop("bad_step"))
        speed = self.clock.units_per_second(step)
        row = {
            **values,
            **self.data.loss_metrics(values["loss"]),
            "param_norm": param_norm(state.params).item(),
            "learning_rate": float(self.schedule(step - 1)),
            f"{self.data.unit}s_per_second": speed,
        }
        self.log.write(step, {f"train/{name}": value for name, value in row.items()})
        self.progress.show(loss=values["loss"], speed=speed)

    def _evaluate(self, step: int, state: TrainState) -> float:
        training = self.experiment.training
        jax.block_until_ready(state)  # the steps still under way are training time
        with self.clock.paused():
            values = evaluate(
                self.eval_step,
                state.params,
                self.data,
                training.eval_batch_size,
                self.devices,
                training.eval_windows,
            )
        if not math.isfinite(values["loss"]):
            raise _diverged(f"the validation loss at step {step} is {values['loss']}")
        self.log.write(step, {f"validation/{name}": value for name, value in values.items()})
        self.progress.show(validation_loss=values["loss"])
        self.progress.line(f"step {step:6d}   validation loss {values['loss']:.4f}")
        return values["loss"]

    def _save(self, step: int, state: TrainState, metrics: Metrics, loss: float | None) -> None:
        jax.block_until_ready(state)
        with self.clock.paused():
            self._check_finite(metrics["bad_step"].item())
            host = parallel.host_copy(state)
            if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(host.params)):
                raise _diverged(f"a parameter is not finite after step {step}")
            self.log.sync()
            self.checkpoints.save(step, _items(host), {"step": step, "loss": loss})
        if loss is not None:
            self.best_loss = min(loss, self.best_loss)

    def _check_finite(self, bad_step: int) -> None:
        if bad_step != FINITE:
            raise _diverged(f"the loss or a gradient was not finite at step {bad_step}")


def _diverged(what: str) -> Diverged:
    return Diverged(
        f"{what}; nothing was saved since. Try a lower optimizer.learning_rate, more optimizer.warmup_steps, "
        "a smaller optimizer.clip_norm, or model.dtype float32, in a new workdir"
    )


# Apart from the step: only the steps that are logged need it.
param_norm = jax.jit(global_norm)


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


def _announce(
    console: Console,
    experiment: Experiment,
    params: optax.Params,
    data: Dataset,
    devices: Sequence[jax.Device],
    changes: Sequence[str],
) -> None:
    """What is about to be trained, on what, and what is different from the last start."""
    console.print(parameter_table(params, experiment.optimizer))
    console.print(f"data      {data.source}")
    console.print(f"devices   {len(devices)} x {devices[0].device_kind}")
    for change in changes:
        console.print(f"changed since the last start: {change}")
        if change.startswith("training.steps") and experiment.optimizer.decay_steps is None:
            console.print(
                "the cosine of the learning rate now ends at the new last step (optimizer.decay_steps)"
            )


def _mapped_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    experiment: Experiment,
    devices: Sequence[jax.Device],
) -> Callable:
    parts = experiment.optimizer.accumulation_steps
    step = make_train_step(model, optimizer, experiment.seed, parallel.AXIS, parts)
    return parallel.map_train_step(step, devices)


def _items(state: TrainState) -> dict[str, optax.Params]:
    """The state as checkpoint items; those who only need parameters read `params` alone."""
    rest = {"step": state.step, "opt_state": state.opt_state, "bad_step": state.bad_step}
    return {"params": state.params, "train_state": rest}


def _restore(checkpoints: Checkpoints, state: TrainState) -> TrainState:
    restored = checkpoints.restore(_items(jax.device_get(state)))
    if restored is None:
        return state
    return TrainState(params=restored.items["params"], **restored.items["train_state"])
