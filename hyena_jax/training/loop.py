"""The steps of a run: train, log, evaluate and save until done or asked to stop."""

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from hyena_jax.config import Experiment
from hyena_jax.data.dataset import Batch, DataEnded, Dataset, Stream, iterate
from hyena_jax.parallel.processes import gather, is_preempted, watch_preemption
from hyena_jax.parallel.replicas import check_replicas
from hyena_jax.parallel.strategy import Strategy
from hyena_jax.system.chips import peak_flops
from hyena_jax.system.errors import UserError
from hyena_jax.system.signals import StopRequest
from hyena_jax.training.checkpoint import TIMED, Checkpoints
from hyena_jax.training.console import Progress
from hyena_jax.training.evaluate import held_out_values, is_reached, sum_held_out
from hyena_jax.training.goodput import flops_per_unit
from hyena_jax.training.lora import Adapted
from hyena_jax.training.loss import Score
from hyena_jax.training.metrics import MetricsLog, NoLog, Values
from hyena_jax.training.optimizer import global_norm, make_schedule
from hyena_jax.training.step import (
    FINITE,
    Metrics,
    TrainState,
    make_eval_step,
    make_gradients,
    make_joint_step,
    make_train_step,
)

if TYPE_CHECKING:
    import grain

REACHED = "reached"
"""In the meta of a checkpoint: the target that the run had reached there, if any."""

UNEVALUATED = "unevaluated"
"""In the meta of a checkpoint: whether its evaluation was cut short, so that a resumed run makes it first."""

UNREAD = "a closed output"
"""In the place of a signal's name: the run stops since nobody reads its output any more."""

COUNT_AFTER = 10.0
"""Seconds of training after which the model's FLOPs are counted, which takes some tenths of a second."""

# Late enough for compilation to be over, long enough to see the pattern of a step.
PROFILE_FROM, PROFILE_STEPS = 5, 10


class Diverged(Exception):
    """The loss, a gradient or a parameter is not finite; nothing was saved since then."""


class _AskedToStop(Exception):
    """A signal came during an evaluation."""


class Setup(NamedTuple):
    """Everything that a run is made of, before its folder is touched."""

    experiment: Experiment
    """With the fields filled in that the model takes from the data."""
    data: Dataset
    strategy: Strategy
    model: nn.Module
    shapes: optax.Params
    """Shapes of the parameters that are trained."""
    optimizer: optax.GradientTransformation
    loss: Score
    metrics: dict[str, Score]
    """The metrics of the experiment and of its data, by label."""
    initial: optax.Params | None
    """Initial parameters of a new run, if they are not drawn at random; with LoRA always the base."""
    initial_sha256: str | None
    """Their digest, see `start.digest`."""
    measured_on: str
    """The held-out rows that evaluations read, see `evaluate.measured_on`."""


def mapped_train_step(setup: Setup, state: TrainState) -> Callable:
    """`make_train_step` over the devices, for states of the shapes of `state`."""
    step = make_train_step(
        setup.model,
        setup.optimizer,
        setup.experiment.seed,
        setup.strategy.axis_name,
        setup.experiment.optimizer.accumulation_steps,
        setup.loss,
        setup.metrics,
    )
    return setup.strategy.map_train_step(step, jax.eval_shape(lambda: state))


class Step(NamedTuple):
    """A training step that is due."""

    setup: Setup
    state: TrainState
    """Placed, and donated."""
    batch: Batch
    """Placed."""


def mapped_joint_step(steps: Sequence[Step]) -> Callable:
    """`make_joint_step` over the devices, for runs whose setups differ in seed and optimizer alone."""
    setup, states = steps[0].setup, tuple(step.state for step in steps)
    gradients = make_gradients(
        setup.model,
        setup.strategy.axis_name,
        setup.experiment.optimizer.accumulation_steps,
        setup.loss,
        setup.metrics,
    )
    optimizers, seeds = zip(
        *((step.setup.optimizer, step.setup.experiment.seed) for step in steps), strict=True
    )
    joint_step = make_joint_step(setup.model, optimizers, seeds, gradients)
    return setup.strategy.map_train_step(joint_step, jax.eval_shape(lambda: states))


def mapped_eval_step(setup: Setup) -> Callable:
    """`make_eval_step` over the devices."""
    step = make_eval_step(setup.model, setup.loss, setup.metrics, setup.data.tallies)
    return setup.strategy.map_eval_step(step)


def already_done(setup: Setup, meta: Mapping[str, Any], step: int) -> str | None:
    """That nothing is left to train after the checkpoint of `step`, and how to continue; None if there is.

    Args:
      meta: of that checkpoint.
    """
    training = setup.experiment.training
    has_reached = training.until is not None and meta.get(REACHED) == training.until
    if has_reached and meta.get("measured_on") == setup.measured_on:
        return f"already reached {training.until} at step {step}; change --training.until to continue"
    if step >= training.steps and not meta.get(UNEVALUATED):
        return f"already trained to step {step}; raise --training.steps to continue"
    return None


@dataclass
class Trainer:
    """The training loop, with its checkpoints, log and progress bar."""

    setup: Setup
    checkpoints: Checkpoints
    log: MetricsLog | NoLog
    progress: Progress
    stop: StopRequest
    profile: "Profile"
    clock: "Clock" = field(init=False)
    schedule: optax.Schedule = field(init=False)
    eval_step: Callable = field(init=False)
    dataset: "grain.MapDataset[Batch] | Stream" = field(init=False)
    best_loss: float = field(init=False)
    """Lowest validation loss of the saved steps, on the rows that this run evaluates on."""
    saved: int = field(init=False)
    """The last saved step."""
    saved_at: float = field(init=False)
    """When that was saved, or training began, in seconds of `time.monotonic`."""
    flops_per_unit: float | None = None
    """FLOPs of training on a token or an image; None until they are counted, 0 if they cannot be."""

    def __post_init__(self) -> None:
        setup, experiment = self.setup, self.setup.experiment
        self.clock = Clock(experiment.data.batch_size * setup.data.units_per_row)
        self.schedule = make_schedule(experiment.optimizer, experiment.training.steps)
        self.eval_step = mapped_eval_step(setup)
        rows = experiment.data.batch_size, experiment.seed, *setup.strategy.row_shard
        self.dataset = setup.data.train_batches(*rows)
        self.best_loss = self.checkpoints.best_loss(setup.measured_on)

    def steps(
        self, state: TrainState, meta: Mapping[str, Any]
    ) -> Generator[Step, tuple[TrainState, Metrics], optax.Params | Adapted]:
        """Trains until done or asked to stop; returns the parameters then.

        Yields each step that is due, and is sent what it gives.

        Args:
          state: placed, of step 0 or of a checkpoint.
          meta: of that checkpoint; empty for a new run.
        """
        setup, experiment, strategy = self.setup, self.setup.experiment, self.setup.strategy
        training, start = experiment.training, int(state.step)
        if isinstance(self.dataset, Stream) and start > 0:
            self.dataset.restore(meta.get("data_state"))
        step, self.saved, self.saved_at = start, start, time.monotonic()
        stopping = False
        if meta.get(UNEVALUATED):
            self._defer_signals()
            stopping = self._end_step(step, state, must_evaluate=True)
        with closing(iterate(self.dataset, start, setup.data.n_readers)) as batches:
            while step < training.steps and not stopping:
                try:
                    with self.clock.waiting():
                        t, batch = next(batches)
                except Exception as error:  # the data may be the user's, which can raise anything
                    has_ended = isinstance(error, DataEnded)
                    # Saving needs all processes, which see the end of the data, but not one another's errors.
                    if step > self.saved and (has_ended or jax.process_count() == 1):
                        self._save(step, state, None, {})
                    if not has_ended:
                        raise
                    raise UserError(
                        f"{error}, before training.steps={training.steps}; the steps so far are saved: lower"
                        " training.steps, or give an iterator that starts over"
                    ) from error
                self.profile.before_step(t)
                state, metrics = yield Step(setup, state, strategy.place_batch(batch))
                step = t + 1
                if step == start + 1:
                    # Keeps compilation out of the reported speed, also that of what rows need.
                    jax.block_until_ready((state, param_norm(state.params), self.schedule(start)))
                    self.clock.begin(step)
                    self._defer_signals()  # from here on there is something to save
                is_last = step == training.steps
                check_every = experiment.parallel.check_replicas_every
                if check_every is not None and step % check_every == 0:
                    check_replicas(strategy.to_global(state), step)
                if step % training.log_every == 0 or is_last:
                    self._log_training(step, state, metrics)
                stopping = self._end_step(step, state)
                self.progress.advance(step)
                self.checkpoints.raise_if_failed()
        self.stop.defer()  # SIGTERM is ours again: there are no more steps to agree on
        if step > start + 1:
            self.progress.note(self._summary(step - start))
        return strategy.host_copy(state.model_params)

    def _summary(self, n_steps: int) -> str:
        """The line about where the time went, of the steps after the first."""
        shares, unit = self.clock.shares(), self.setup.data.unit
        parts = {"training": 1 - sum(shares.values()), **shares}
        speed = max(n_steps - 1, 0) * self.clock.units_per_step / max(self.clock.seconds, 1e-9)
        n_devices = len(self.setup.strategy.devices)
        values = [
            f"{share:.0%} {part.replace('data_wait', 'waiting for data')}" for part, share in parts.items()
        ]
        line = f"time      {', '.join(values)}; {speed / n_devices:,.0f} {unit}s/s a device over all of it"
        if self.flops_per_unit:
            rate = speed * self.flops_per_unit / n_devices
            line += f", {rate / 1e9:,.1f} model GFLOP/s a device"
            peak = peak_flops(self.setup.strategy.devices[0].device_kind)
            if peak is not None:
                line += f", MFU {rate / peak:.3f}"
        return line

    def _defer_signals(self) -> None:
        """From now on signals wait for the end of a step: of the same step in all processes."""
        self.stop.defer()
        watch_preemption()

    def _end_step(self, step: int, state: TrainState, must_evaluate: bool = False) -> bool:
        """Evaluates and saves where that is due; returns whether training stops.

        Args:
          must_evaluate: the step is that of the checkpoint from which the run continues, whose evaluation was
            cut short; it is saved once more, with its loss.
        """
        training, stop = self.setup.experiment.training, self.stop
        is_last = step == training.steps
        loss, more = None, {}
        if step % training.eval_every == 0 or is_last or must_evaluate:
            values = self._evaluate(step, state)
            if values is None and must_evaluate:  # the checkpoint stays as it is
                return True
            if values is None:
                more[UNEVALUATED] = True
            else:
                loss = values["loss"]
                if training.until is not None and is_reached(training.until, values):
                    more[REACHED] = training.until
        if REACHED in more and not is_last:
            self.progress.note(f"reached {training.until} at step {step}")
        is_best = loss is not None and loss < self.best_loss
        if self.progress.is_unread:
            stop.name = stop.name or UNREAD
        asked, is_overdue = self._agree(step)
        stopping = asked is not None or REACHED in more
        if step % training.checkpoint_every == 0 or is_best or is_last or stopping or must_evaluate:
            self._save(step, state, loss, more, is_replacing=must_evaluate)
        elif is_overdue:
            self._save(step, state, loss, {**more, TIMED: True})
        return stopping

    def _agree(self, step: int) -> tuple[str | None, bool]:
        """The name of the signal that asked to stop, or None, and whether a save is overdue.

        All processes must call this, and get the same: they stop and save at the same step.
        """
        experiment, stop = self.setup.experiment, self.stop
        minutes, is_overdue = experiment.training.checkpoint_minutes, False
        asked = stop.name  # read once: a signal that comes later waits for the next step
        if is_preempted(step):
            asked = "SIGTERM"
        elif step % experiment.parallel.stop_every == 0:
            is_overdue = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
            answers = gather([asked, is_overdue])
            asked = next((name for name, _ in answers if name is not None), None)
            is_overdue = answers[0][1]  # of the first process: clocks differ
        elif jax.process_count() > 1:
            asked = None
        stop.name = stop.name or asked
        return asked, is_overdue

    def _log_training(self, step: int, state: TrainState, metrics: Metrics) -> None:
        values = {name: value.item() for name, value in metrics.items()}
        _require_finite(values.pop("bad_step"))
        experiment, data = self.setup.experiment, self.setup.data
        wait, speed = self.clock.wait_share, self.clock.units_per_second(step)
        row = {
            **values,
            **(data.loss_metrics(values["loss"]) if experiment.loss.in_nats else {}),
            "param_norm": param_norm(state.params).item(),
            "learning_rate": float(self.schedule(step - 1)),
            **({} if speed is None else {f"{data.unit}s_per_second": speed, "data_wait": wait}),
        }
        goodput = {f"goodput/{name}": value for name, value in self._goodput(speed).items()}
        self.log.write(step, {f"train/{name}": value for name, value in row.items()} | goodput)
        self.progress.training(step, values["loss"], speed)

    def _goodput(self, speed: float | None) -> Values:
        """How the devices were used at a speed in units a second, and what else the run's time went into.

        Model FLOPs are three times those of the forward pass: nothing that is recomputed counts. They are
        counted once the run has lasted a while, since counting takes longer than some runs.
        """
        row = self.clock.shares()
        if speed is None:
            return row
        data, devices = self.setup.data, self.setup.strategy.devices
        row[f"device_{data.unit}s_per_second"] = speed / len(devices)
        if self.flops_per_unit is None and self.clock.seconds >= COUNT_AFTER:
            with self.clock.paused():
                self.flops_per_unit = flops_per_unit(self.setup.experiment, data.units_per_row)
        if self.flops_per_unit:
            row["model_flops_per_second"] = speed * self.flops_per_unit
            peak = peak_flops(devices[0].device_kind)
            if peak is not None:
                row["mfu"] = speed * self.flops_per_unit / (peak * len(devices))
        return row

    def _evaluate(self, step: int, state: TrainState) -> Values | None:
        """Held-out values; None if the process was asked to stop meanwhile, for an evaluation may be long."""

        def until_asked(batches: Iterable[Batch], _: int) -> Iterator[Batch]:
            for batch in batches:
                if self.stop.is_set and jax.process_count() == 1:  # several would have to agree on a batch
                    raise _AskedToStop
                yield batch

        data, strategy, training = self.setup.data, self.setup.strategy, self.setup.experiment.training
        jax.block_until_ready(state)  # steps that still run count as training time
        with self.clock.paused("evaluating"), self.progress.evaluating():
            batch_size, n_rows = training.eval_batch_size, training.eval_windows
            arguments = strategy, self.eval_step, state.model_params, data, batch_size, n_rows
            try:
                sums = sum_held_out(*arguments, until_asked)
            except _AskedToStop:
                return None
        values = held_out_values(data, sums)
        if not math.isfinite(values["loss"]):
            raise _diverged(f"the validation loss at step {step} is {values['loss']}")
        self.log.write(step, {f"validation/{name}": value for name, value in values.items()})
        names = dict.fromkeys((*data.curves, *self.setup.metrics))
        shown = {name: values[name] for name in names if name != "loss" and name in values}
        self.progress.validation(step, values["loss"], shown)
        return values

    def _save(
        self,
        step: int,
        state: TrainState,
        loss: float | None,
        more: Mapping[str, Any],
        is_replacing: bool = False,
    ) -> None:
        jax.block_until_ready(state)
        with self.clock.paused("saving"):
            _require_finite(state.bad_step.item())
            if not all_finite(state.params):
                raise _diverged(f"a parameter is not finite after step {step}")
            self.log.sync()
            meta = {"step": step, "loss": loss, **more}
            if loss is not None:
                meta["measured_on"] = self.setup.measured_on
            if state.base is not None:
                meta["base"] = self.setup.initial_sha256
            if isinstance(self.dataset, Stream):
                meta["data_state"] = self.dataset.state()
            items = self.setup.strategy.to_global(state).to_items()
            self.checkpoints.save(step, items, meta, is_replacing)
        self.saved, self.saved_at = step, time.monotonic()
        if loss is not None:
            self.best_loss = min(loss, self.best_loss)


def _require_finite(bad_step: int) -> None:
    if bad_step != FINITE:
        raise _diverged(f"the loss or a gradient was not finite at step {bad_step}")


def _diverged(what: str) -> Diverged:
    return Diverged(
        f"{what}; nothing was saved since. Try a lower optimizer.learning_rate, a longer warm-up, a lower "
        "optimizer.clip_norm, or model.dtype float32, in a new workdir"
    )


# Not part of the training step: only the steps that are logged need it.
param_norm = jax.jit(global_norm)


@jax.jit
def all_finite(params: optax.Params) -> jax.Array:
    """Whether every entry is finite, bool []."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()


class Clock:
    """Training speed, without the time that evaluation and saving take; and the shares of these."""

    def __init__(self, units_per_step: int):
        self.units_per_step = units_per_step
        self._seconds: dict[str, float] = {"data_wait": 0.0, "evaluating": 0.0, "saving": 0.0}
        self._began = None
        self.restart(0)

    @property
    def seconds(self) -> float:
        """Since the first step."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def shares(self) -> dict[str, float]:
        """The part of the time since the first step that went into waiting and each kind of pause, 0 to 1."""
        return {part: spent / max(self.seconds, spent, 1e-9) for part, spent in self._seconds.items()}

    def begin(self, step: int) -> None:
        """Begins the first interval: compilation is over."""
        self._began = time.perf_counter()
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begins a new interval after `step`."""
        self._step, self._start, self._waited = step, time.perf_counter(), 0.0

    def units_per_second(self, step: int) -> float | None:
        """The speed since the interval began, or None if it began at this step; begins a new one."""
        if step == self._step:
            return None
        units = (step - self._step) * self.units_per_step
        speed = units / (time.perf_counter() - self._start)
        self.restart(step)
        return speed

    @property
    def wait_share(self) -> float:
        """The part of the time since the interval began that `waiting` took, from 0 to 1."""
        return self._waited / (time.perf_counter() - self._start)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time in this context is time without data to train on."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self._waited += took
            self._seconds["data_wait"] += took

    @contextmanager
    def paused(self, part: str | None = None) -> Iterator[None]:
        """Time in this context does not count; its share is kept under the name of `part`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self._start += took
            if part is not None:
                self._seconds[part] += took


class Profile(ExitStack):
    """Traces PROFILE_STEPS steps into `folder`, PROFILE_FROM steps after the start; earlier in a short run.

    With `at` or `every`, after the steps in `at` and after every so many, each trace in its own subfolder. A
    context manager, which ends the trace; does nothing if `folder` is None.
    """

    def __init__(
        self, folder: Path | None, start: int, steps: int, at: Sequence[int] = (), every: int | None = None
    ):
        super().__init__()
        self._folder, self._at, self._every = folder, at, every
        self._first = None
        if not at and every is None:
            self._first = start + max(0, min(PROFILE_FROM, steps - start - PROFILE_STEPS))
        self._end = start

    def before_step(self, t: int) -> None:
        """Starts or stops the trace at its steps; `t` counts steps from 0."""
        if t == self._end:
            self.close()
        is_due = t in self._at or (self._every is not None and t > 0 and t % self._every == 0)
        if self._folder is not None and t >= self._end and (is_due or t == self._first):
            self._end = t + PROFILE_STEPS
            self.enter_context(jax.profiler.trace(self._folder / f"step_{t}" if is_due else self._folder))
