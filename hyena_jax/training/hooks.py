"""What happens after each training step: hooks, called in the order of `standard_hooks`."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import jax
import optax

from hyena_jax.data.dataset import Batch, Stream
from hyena_jax.parallel.processes import check_replicas, gather, is_preempted, watch_preemption
from hyena_jax.system.chips import peak_flops
from hyena_jax.system.signals import StopRequest
from hyena_jax.training.checkpoint import Checkpoints, Meta
from hyena_jax.training.console import Progress
from hyena_jax.training.evaluate import held_out_values, is_reached, sum_held_out
from hyena_jax.training.metrics import MetricsLog, NoLog, Values
from hyena_jax.training.optimizer import make_schedule
from hyena_jax.training.setup import Setup, mapped_eval_step
from hyena_jax.training.step import FINITE, Metrics, TrainState, param_norm
from hyena_jax.training.timing import Clock, flops_per_unit

if TYPE_CHECKING:
    import grain

UNREAD = "a closed output"
"""In the place of a signal's name: the run stops since nobody reads its output any more."""

COUNT_AFTER = 10.0
"""Seconds of training after which the model's FLOPs are counted, which takes some tenths of a second."""


class Diverged(Exception):
    """The loss, a gradient or a parameter is not finite; nothing was saved since then."""


@dataclass
class Now:
    """The state after a step, and what the hooks have found there; each reads what those before it found."""

    step: int
    state: TrainState
    """Placed; the next step takes its memory."""
    metrics: Metrics | None
    """Of the step; None if it was an earlier start that trained it: see `is_repeated`."""
    is_last: bool
    loss: float | None = None
    """The validation loss, if it was measured here."""
    reached: str | None = None
    """`training.until`, if an evaluation reached it here."""
    unevaluated: bool = False
    """Whether a signal cut the evaluation short."""
    asked: str | None = None
    """The name of the signal that asked to stop."""
    is_overdue: bool = False
    """Whether the last checkpoint is older than `training.checkpoint_minutes`."""

    @property
    def is_repeated(self) -> bool:
        """Whether this is the step of a checkpoint whose evaluation was cut short, and is made now."""
        return self.metrics is None

    @property
    def stops(self) -> bool:
        """Whether the run ends here."""
        return self.is_last or self.reached is not None or self.asked is not None


Hook = Callable[[Now], None]
"""Called after each step. What is due when is its own business."""


@dataclass
class LiveRun:
    """A run that is being trained: what its hooks share."""

    setup: Setup
    start: int
    """The step after which it starts, or continues."""
    meta: Meta | None
    """Of the checkpoint from which it continues."""
    checkpoints: Checkpoints
    log: MetricsLog | NoLog
    progress: Progress
    stop: StopRequest
    is_done: bool = False
    """Whether nothing is left to train."""

    @cached_property
    def rows(self) -> "grain.MapDataset[Batch] | Stream":
        """The batches of the training data, of this process's rows; an iterator's, after those of `start`."""
        setup, experiment = self.setup, self.setup.experiment
        rows_of = experiment.data.batch_size, experiment.seed, *setup.strategy.row_shard
        rows = setup.data.train_batches(*rows_of)
        if isinstance(rows, Stream) and self.start > 0:
            rows.restore(self.meta.data_state)
        return rows

    @cached_property
    def clock(self) -> Clock:
        """The time that the run takes."""
        return Clock(self.setup.experiment.data.batch_size * self.setup.data.units_per_row)

    @cached_property
    def schedule(self) -> optax.Schedule:
        """The learning rate of each step, one program."""
        return jax.jit(make_schedule(self.setup.experiment.optimizer, self.setup.experiment.training.steps))

    @cached_property
    def save(self) -> "Save":
        """The hook that writes checkpoints, which an error of the data calls too."""
        return Save(self)

    @property
    def must_evaluate(self) -> bool:
        """Whether the evaluation of the checkpoint was cut short, so that it is made first."""
        return self.meta is not None and self.meta.unevaluated

    def now(self, step: int, state: TrainState, metrics: Metrics | None = None) -> Now:
        """The state after a step, before any hook has seen it."""
        return Now(step, state, metrics, self.is_done or step >= self.setup.experiment.training.steps)


def standard_hooks(run: LiveRun) -> Sequence[Hook]:
    """The hooks of every run. The order is part of what a run promises: a step's rows are written before its
    checkpoint is, and only a state whose loss is known can be the best."""
    return Begin(run), CheckReplicas(run), Log(run), Evaluate(run), Agree(run), run.save, Show(run)


@dataclass
class _OfRun:
    """What all hooks have: the run that they belong to."""

    run: LiveRun


class Begin(_OfRun):
    """After the first step: time counts from here on, and signals wait for the end of a step."""

    def __call__(self, now: Now) -> None:
        run = self.run
        if now.step == run.start + 1:
            # Keeps compilation out of the reported speed, also that of what rows need.
            jax.block_until_ready((now.state, param_norm(now.state.params), run.schedule(run.start)))
            run.clock.begin(now.step)
        if now.step <= run.start + 1:  # from here on there is something to save
            run.stop.defer()
            watch_preemption()  # all processes stop after the same step


class CheckReplicas(_OfRun):
    """Every `parallel.check_replicas_every` steps: the copies on all devices are equal to the bit."""

    def __call__(self, now: Now) -> None:
        every = self.run.setup.experiment.parallel.check_replicas_every
        if every is not None and now.step % every == 0:
            check_replicas(self.run.setup.strategy.to_global(now.state), now.step)


class Log(_OfRun):
    """Every `training.log_every` steps: a row of metrics, with how the devices were used."""

    def __call__(self, now: Now) -> None:
        run, experiment, data = self.run, self.run.setup.experiment, self.run.setup.data
        if now.is_repeated or not (now.step % experiment.training.log_every == 0 or now.is_last):
            return
        values = {name: value.item() for name, value in now.metrics.items()}
        _require_finite(values.pop("bad_step"))
        wait, speed = run.clock.wait_share, run.clock.units_per_second(now.step)
        row = {
            **values,
            **(data.loss_metrics(values["loss"]) if experiment.loss.in_nats else {}),
            "param_norm": param_norm(now.state.params).item(),
            "learning_rate": float(run.schedule(now.step - 1)),
            **({} if speed is None else {f"{data.unit}s_per_second": speed, "data_wait": wait}),
        }
        goodput = {f"goodput/{name}": value for name, value in self._goodput(speed).items()}
        run.log.write(now.step, {f"train/{name}": value for name, value in row.items()} | goodput)
        run.progress.training(now.step, values["loss"], speed)

    def _goodput(self, speed: float | None) -> Values:
        """How the devices were used at a speed in units a second, and what else the run's time went into.

        FLOPs are counted once the run has lasted a while, since counting takes longer than some runs.
        """
        clock, data, devices = self.run.clock, self.run.setup.data, self.run.setup.strategy.devices
        row = clock.shares()
        if speed is None:
            return row
        row[f"device_{data.unit}s_per_second"] = speed / len(devices)
        if clock.flops_per_unit is None and clock.seconds >= COUNT_AFTER:
            with clock.paused():
                clock.flops_per_unit = flops_per_unit(self.run.setup.experiment, data.units_per_row)
        if clock.flops_per_unit:
            row["model_flops_per_second"] = speed * clock.flops_per_unit
            peak = peak_flops(devices[0].device_kind)
            if peak is not None:
                row["mfu"] = speed * clock.flops_per_unit / (peak * len(devices))
        return row


class _AskedToStop(Exception):
    """A signal came during an evaluation."""


class Evaluate(_OfRun):
    """Every `training.eval_every` steps: the held-out values, and whether they reach `training.until`."""

    @cached_property
    def _eval_step(self) -> Callable:
        return mapped_eval_step(self.run.setup)

    def __call__(self, now: Now) -> None:
        training = self.run.setup.experiment.training
        if not (now.step % training.eval_every == 0 or now.is_last or now.is_repeated):
            return
        values = self._values(now)
        if values is None:
            now.unevaluated = True
            return
        now.loss = values["loss"]
        if training.until is not None and is_reached(training.until, values):
            now.reached = training.until
            if not now.is_last:
                self.run.progress.note(f"reached {training.until} at step {now.step}")

    def _values(self, now: Now) -> Values | None:
        """Held-out values; None if the process was asked to stop meanwhile, for an evaluation may be long."""

        def until_asked(batches: Iterable[Batch], _: int) -> Iterator[Batch]:
            for batch in batches:
                if run.stop.is_set and jax.process_count() == 1:  # several would have to agree on a batch
                    raise _AskedToStop
                yield batch

        run = self.run
        data, strategy, training = run.setup.data, run.setup.strategy, run.setup.experiment.training
        jax.block_until_ready(now.state)  # steps that still run count as training time
        with run.clock.paused("evaluating"), run.progress.evaluating():
            of_rows = data, training.eval_batch_size, training.eval_windows, until_asked
            try:
                sums = sum_held_out(strategy, self._eval_step, now.state.model_params, *of_rows)
                values = held_out_values(data, sums)
            except _AskedToStop:
                return None
            except Exception:  # the data and metrics may be the user's: the steps so far are kept
                now.unevaluated = True
                if jax.process_count() == 1 and now.step > run.save.saved:
                    run.save.write(now)
                raise
        if not math.isfinite(values["loss"]):
            raise _diverged(f"the validation loss at step {now.step} is {values['loss']}")
        run.log.write(now.step, {f"validation/{name}": value for name, value in values.items()})
        names = dict.fromkeys((*data.curves, *run.setup.metrics))
        shown = {name: values[name] for name in names if name != "loss" and name in values}
        run.progress.validation(now.step, values["loss"], shown)
        return values


class Agree(_OfRun):
    """Whether a signal asked to stop, and whether a save is overdue: the same in all processes."""

    def __call__(self, now: Now) -> None:
        experiment, stop = self.run.setup.experiment, self.run.stop
        if self.run.progress.is_unread:
            stop.name = stop.name or UNREAD
        minutes = experiment.training.checkpoint_minutes
        asked = stop.name  # read once: a signal that comes later waits for the next step
        if is_preempted(now.step):
            asked = "SIGTERM"
        elif now.step % experiment.parallel.stop_every == 0:
            since = time.monotonic() - self.run.save.saved_at
            answers = gather([asked, minutes is not None and since >= 60 * minutes])
            asked = next((name for name, _ in answers if name is not None), None)
            now.is_overdue = answers[0][1]  # of the first process: clocks differ
        elif jax.process_count() > 1:
            asked = None
        stop.name = stop.name or asked
        now.asked = asked


@dataclass
class Save(_OfRun):
    """Every `training.checkpoint_every` steps, and where the run stops or is at its best: a checkpoint."""

    saved: int = field(init=False)
    """The last saved step."""
    saved_at: float = field(init=False)
    """When that was saved, or training began, in seconds of `time.monotonic`."""

    def __post_init__(self) -> None:
        self.saved, self.saved_at = self.run.start, time.monotonic()
        self._best_loss = self.run.checkpoints.best_loss(self.run.setup.measured_on)
        self._latest: Now | None = None

    def __call__(self, now: Now) -> None:
        self._latest = now
        if now.is_repeated:  # the arrays stay as they are
            if not now.unevaluated:
                self._complete(now)
            return
        is_best = now.loss is not None and now.loss < self._best_loss
        every = self.run.setup.experiment.training.checkpoint_every
        is_due = now.step % every == 0 or is_best or now.stops
        if is_due or now.is_overdue:
            self.write(now, is_timed=not is_due)

    def rescue(self) -> None:
        """Saves the state after the latest step, unless that is done: there will be no further one."""
        if self._latest is not None and self._latest.step > self.saved:
            self.write(self.run.now(self._latest.step, self._latest.state, self._latest.metrics))

    def _complete(self, now: Now) -> None:
        """The checkpoint from which the run continues gets the loss that was cut short when it was saved."""
        self.run.log.sync()
        known = {"loss": now.loss, "measured_on": self.run.setup.measured_on, "reached": now.reached}
        self.run.checkpoints.revise(self.run.meta._replace(**known, unevaluated=False, timed=False))
        self._best_loss = min(now.loss, self._best_loss)

    def write(self, now: Now, is_timed: bool = False) -> None:
        run, setup, state = self.run, self.run.setup, now.state
        jax.block_until_ready(state)
        with run.clock.paused("saving"):
            _require_finite(state.bad_step.item())
            if not math.isfinite(param_norm(state.params)):
                raise _diverged(f"the parameters' norm is not finite after step {now.step}")
            run.log.sync()
            meta = Meta(
                step=now.step,
                loss=now.loss,
                measured_on=None if now.loss is None else setup.measured_on,
                reached=now.reached,
                unevaluated=now.unevaluated,
                timed=is_timed,
                base=None if state.base is None else setup.initial_sha256,
                data_state=run.rows.state() if isinstance(run.rows, Stream) else None,
            )
            items = setup.strategy.to_global(state).to_items()
            run.checkpoints.save(meta, items)
        self.saved, self.saved_at = now.step, time.monotonic()
        if now.loss is not None:
            self._best_loss = min(now.loss, self._best_loss)


class Show(_OfRun):
    """Moves the progress bar; after the last step, says where the time went."""

    def __call__(self, now: Now) -> None:
        if now.is_repeated:
            return
        self.run.progress.advance(now.step)
        self.run.checkpoints.raise_if_failed()
        if now.stops and now.step > self.run.start + 1:
            self.run.progress.note(self._summary(now.step - self.run.start))

    def _summary(self, n_steps: int) -> str:
        clock, devices, unit = self.run.clock, self.run.setup.strategy.devices, self.run.setup.data.unit
        shares = clock.shares()
        parts = {"training": 1 - sum(shares.values()), **shares}
        speed = max(n_steps - 1, 0) * clock.units_per_step / max(clock.seconds, 1e-9)
        values = [
            f"{share:.0%} {part.replace('data_wait', 'waiting for data')}" for part, share in parts.items()
        ]
        line = f"time      {', '.join(values)}; {speed / len(devices):,.0f} {unit}s/s a device over all of it"
        if clock.flops_per_unit:
            rate = speed * clock.flops_per_unit / len(devices)
            line += f", {rate / 1e9:,.1f} model GFLOP/s a device"
            peak = peak_flops(devices[0].device_kind)
            if peak is not None:
                line += f", MFU {rate / peak:.3f}"
        return line


def _require_finite(bad_step: int) -> None:
    if bad_step != FINITE:
        raise _diverged(f"the loss or a gradient was not finite at step {bad_step}")


def _diverged(what: str) -> Diverged:
    return Diverged(
        f"{what}; nothing was saved since. Try a lower optimizer.learning_rate, a longer warm-up, a lower "
        "optimizer.clip_norm, or model.dtype float32, in a new workdir"
    )
