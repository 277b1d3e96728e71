"""The training loop: restore, then step, log, evaluate, save until done or told to stop."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from hyena_jax import config, models
from hyena_jax.config import Experiment, LanguageModelConfig, UserError, require
from hyena_jax.data import loader
from hyena_jax.data.dataset import Dataset, load
from hyena_jax.training import export, parallel
from hyena_jax.training.checkpoint import Checkpoints, best
from hyena_jax.training.distributed import first_request, from_first, is_first, require_equal, together
from hyena_jax.training.evaluate import evaluate
from hyena_jax.training.metrics import MetricsLog, NoLog, draw_learning_curves
from hyena_jax.training.optimizer import global_norm, make_optimizer, make_schedule
from hyena_jax.training.profiling import Profile
from hyena_jax.training.progress import Progress, parameter_table
from hyena_jax.training.replicas import check_replicas
from hyena_jax.training.run_folder import CHECKPOINTS, Run, check_run, kept_encoding, locked, open_run
from hyena_jax.training.signals import Interrupted, StopRequest, stop_requests
from hyena_jax.training.step import (
    FINITE,
    Metrics,
    TrainState,
    init_params,
    init_state,
    make_eval_step,
    make_train_step,
)
from hyena_jax.training.strategy import Strategy


class Diverged(Exception):
    """The loss or a gradient is not finite; nothing was saved since."""


class Result(NamedTuple):
    """What a finished run leaves in memory of every process."""

    model: nn.Module
    params: optax.Params
    """NumPy arrays."""
    data: Dataset


def train(
    experiment: Experiment,
    workdir: Path,
    console: Console,
    profile: Path | None = None,
    init_from: Path | None = None,
    accept_changed_data: bool = False,
) -> Result:
    """Trains to `experiment.training.steps`, from the newest checkpoint in `workdir` if there is one.

    All that can be wrong with the input is checked before `workdir` is touched. Of several processes all
    call this with the same arguments; each reads its own rows of every batch, and the first alone prints and
    writes.

    Args:
      profile: folder for a `jax.profiler` trace of a few steps.
      init_from: file of parameters (see `export`) that a new run starts from.
      accept_changed_data: continue although the data are not those that the run was started with; they are
        read with the run's own tokenizer or normalization.

    Raises:
      UserError: see `load`, `Dataset.complete`, `make_optimizer`, `check_run` and `Checkpoints.restore`.
      Diverged: if the loss or a gradient is not finite.
      Interrupted: after one of `signals.STOPPING`.
    """
    require(profile is None or not profile.is_file(), "profile", str(profile), "a folder, not a file")
    with stop_requests() as stop:
        if jax.process_count() > 1:
            stop.defer()  # all must agree on where to stop
        return _train(experiment, workdir, console, profile, init_from, accept_changed_data, stop)


def _train(
    experiment: Experiment,
    workdir: Path,
    console: Console,
    profile: Path | None,
    init_from: Path | None,
    accept_changed_data: bool,
    stop: StopRequest,
) -> Result:
    data = together(lambda: _load(experiment, workdir, accept_changed_data))
    experiment = data.complete(experiment)
    require_equal("the experiment and its data", [config.encode(experiment), data.fingerprint])
    strategy = parallel.make_strategy(experiment.parallel)
    accumulation_steps = experiment.optimizer.accumulation_steps
    parallel.check_batch(experiment.data.batch_size, strategy.row_shards, accumulation_steps)
    strategy.check_batch(data.train_batches(1, experiment.seed)[0])
    of_text = isinstance(experiment.model, LanguageModelConfig)
    model = models.build(experiment.model, strategy.sequence_axis if of_text else None)
    params = jax.eval_shape(lambda: init_params(model, experiment.seed))
    optimizer = make_optimizer(experiment.optimizer, params, experiment.training.steps)
    console = console if is_first() else Console(quiet=True)
    report = partial(console.print, soft_wrap=True)
    given = None if init_from is None else together(lambda: export.read(init_from, params, report))

    def check() -> Run | None:
        return check_run(workdir, experiment, data, accept_changed_data)

    together(lambda: check() if is_first() else None)
    with ExitStack() as stack:
        together(lambda: stack.enter_context(locked(workdir)) if is_first() else None)
        # From here on nobody else changes it.
        run = together(lambda: check() if is_first() else None)
        folder = workdir / CHECKPOINTS
        checkpoints = stack.enter_context(
            Checkpoints(folder, experiment.training.keep_checkpoints, console.print)
        )
        state = _restore_or_make(checkpoints, strategy, model, optimizer, experiment.seed, given)
        changes = from_first(lambda: open_run(workdir, run, experiment, data))
        _announce(console, experiment, params, data, strategy.devices, changes)
        start = int(state.step)
        if start >= experiment.training.steps:
            console.print(f"already trained to step {start}; a larger --training.steps goes on")
            _draw_curves(workdir, data)
            return Result(model, strategy.host_copy(state.params), data)
        if start:
            console.print(f"continuing after step {start}")
        trainer = Trainer(
            experiment=experiment,
            data=data,
            strategy=strategy,
            train_step=_mapped_train_step(model, optimizer, experiment, strategy, state),
            eval_step=strategy.map_eval_step(make_eval_step(model)),
            checkpoints=checkpoints,
            log=stack.enter_context(_metrics_log(workdir, start, experiment)),
            progress=stack.enter_context(Progress(console, start, experiment.training.steps, data.unit)),
            best_loss=from_first(lambda: best(folder).loss),
        )
        folder = profile if is_first() else None
        trace = stack.enter_context(Profile(folder, start, experiment.training.steps))
        stop.defer()
        params = trainer.run(state, start, stop, trace)
        stop.name = first_request(stop.name)  # one that came after the last step counts too
    _draw_curves(workdir, data)
    if stop.is_set:
        raise Interrupted(f"stopped by {stop.name} and saved; the same command continues")
    return Result(model, params, data)


def _load(experiment: Experiment, workdir: Path, accept_changed_data: bool) -> Dataset:
    """The data, read as a run that is there reads them."""
    encoding = kept_encoding(workdir, experiment)
    try:
        return load(experiment.data, encoding)
    except UserError:
        if encoding is None or accept_changed_data:
            raise
        return load(experiment.data)  # other symbols: `check_run` says that the data changed


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
    clock: "Clock" = field(init=False)
    schedule: optax.Schedule = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.experiment.data.batch_size * self.data.units_per_row)
        self.schedule = make_schedule(self.experiment.optimizer, self.experiment.training.steps)

    def run(self, state: TrainState, start: int, stop: StopRequest, profile: Profile) -> optax.Params:
        """Trains from step `start` on until done or asked to stop; returns the parameters then."""
        training = self.experiment.training
        rows, batch_size = self.strategy.rows, self.experiment.data.batch_size
        dataset = self.data.train_batches(batch_size, self.experiment.seed, *rows)
        check_every = self.experiment.parallel.check_replicas_every
        step, stopping = start, False
        with closing(loader.iterate(dataset, start)) as batches:
            while step < training.steps and not stopping:
                t, batch = next(batches)
                profile.before_step(t)
                state, metrics = self.train_step(state, self.strategy.place_batch(batch))
                step = t + 1
                if step == start + 1:
                    jax.block_until_ready(state)  # keep compilation out of the speed that is reported
                    self.clock.restart(step)
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
                    self._save(step, state, metrics, loss)
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
                self.strategy,
                self.eval_step,
                state.params,
                self.data,
                training.eval_batch_size,
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
            if not all_finite(state.params):
                raise _diverged(f"a parameter is not finite after step {step}")
            self.log.sync()
            items = checkpoint_items(self.strategy.to_global(state))
            self.checkpoints.save(step, items, {"step": step, "loss": loss})
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
    processes = jax.process_count()
    among = f" in {processes} processes" if processes > 1 else ""
    console.print(f"devices   {len(devices)} x {devices[0].device_kind}{among}")
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
    strategy: Strategy,
    state: TrainState,
) -> Callable:
    parts = experiment.optimizer.accumulation_steps
    step = make_train_step(model, optimizer, experiment.seed, strategy.axis_name, parts)
    return strategy.map_train_step(step, jax.eval_shape(lambda: state))


def _metrics_log(workdir: Path, step: int, experiment: Experiment) -> AbstractContextManager:
    if is_first():
        return MetricsLog(workdir, step, experiment.logging.tensorboard)
    return nullcontext(NoLog())


def _draw_curves(workdir: Path, data: Dataset) -> None:
    if is_first():
        draw_learning_curves(workdir, data.curves)


def checkpoint_items(state: TrainState) -> dict[str, optax.Params]:
    """The state as checkpoint items; those who only need parameters read `params` alone."""
    rest = {"step": state.step, "opt_state": state.opt_state, "bad_step": state.bad_step}
    return {"params": state.params, "train_state": rest}


def _restore_or_make(
    checkpoints: Checkpoints,
    strategy: Strategy,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    seed: int,
    given: optax.Params | None,
) -> TrainState:
    """The placed state of the newest checkpoint; or that before the first step, with the parameters given."""

    def make() -> TrainState:
        return init_state(init_params(model, seed), optimizer)

    restored = checkpoints.restore(checkpoint_items(strategy.restore_target(jax.eval_shape(make))))
    if restored is None:
        state = strategy.make_state(make)
        return state if given is None else state._replace(params=strategy.place(given))
    state = TrainState(params=restored.items["params"], **restored.items["train_state"])
    return strategy.from_global(state)
