"""A run, from its start to its end: `train` is the whole of it."""

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import optax
from rich.console import Console

from hyena_jax import config
from hyena_jax.config import Experiment
from hyena_jax.data import dataset
from hyena_jax.data.dataset import Batch, DataEnded, Dataset, iterate
from hyena_jax.parallel.processes import from_first, gather, is_first, on_first
from hyena_jax.system.errors import UserError, as_urls, require
from hyena_jax.system.signals import Interrupted, StopRequest, stop_requests
from hyena_jax.system.storage.mirror import share
from hyena_jax.training import lora
from hyena_jax.training.checkpoint import Checkpoints, Meta, saved_steps
from hyena_jax.training.console import Progress, announce
from hyena_jax.training.folder import (
    BASE,
    CHECKPOINTS,
    DESCRIPTION,
    RunFolder,
    hold,
    open_run,
    require_checkpoint_if_logged,
)
from hyena_jax.training.hooks import Hook, LiveRun, standard_hooks
from hyena_jax.training.initial import require_finite, require_same_base, write_base
from hyena_jax.training.lora import Adapted
from hyena_jax.training.metrics import MetricsLog, NoLog, draw_learning_curves
from hyena_jax.training.options import NO_OPTIONS, StartOptions
from hyena_jax.training.setup import LoadData, Setup, agree, keeps_state, make_setup, mapped_train_step
from hyena_jax.training.step import TrainState, init_params, init_state, param_norm
from hyena_jax.training.timing import Profile, check_profile
from hyena_jax.training.trackers import Start, Trackers


class Result(NamedTuple):
    """The result of a finished run, in every process."""

    model: nn.Module
    params: optax.Params
    """NumPy arrays."""
    data: Dataset


def train(
    experiment: Experiment,
    workdir: Path,
    console: Console,
    options: StartOptions = NO_OPTIONS,
    load_data: LoadData = dataset.load,
    make_hooks: Callable[[LiveRun], Sequence[Hook]] = standard_hooks,
) -> Result:
    """Trains to `experiment.training.steps`, from the newest checkpoint in `workdir` if there is one.

    All input is checked before `workdir` is touched. Several processes all call this with the same arguments;
    each reads its own rows of every batch, and only the first prints and writes.

    Raises:
      UserError: if the input is wrong: see `make_setup`, `folder.check_run` and `Checkpoints.restore`.
      Diverged: if the loss or a gradient is not finite.
      Interrupted: after a signal in `signals.STOPPING`, once a step was trained; before, they act as usual.
    """
    check_profile(options, workdir)
    with stop_requests() as stop:
        console = console if is_first() else Console(quiet=True)
        agree(experiment, workdir=as_urls(workdir.absolute()), **options.shared())
        setup = make_setup(experiment, console, workdir, options, load_data)
        with (
            start_run(setup, workdir, console, stop, options) as (run, state),
            closing(batches(run)) as rows,
            Profile(options, run.start, setup.experiment.training.steps) as trace,
        ):
            train_step, hooks = mapped_train_step(setup, state), make_hooks(run)
            now = run.now(run.start, state)
            for hook in hooks if run.must_evaluate else ():
                hook(now)
            while not now.stops:
                t, batch = next(rows)
                trace.before_step(t)
                state, metrics = train_step(state, setup.strategy.place_batch(batch))
                now = run.now(t + 1, state, metrics)
                for hook in hooks:  # log, evaluate, save, show: in this order, each when it is due
                    hook(now)
            stop.defer()  # from here on SIGTERM asks this process alone: there are no more steps to agree on
            params = setup.strategy.host_copy(state.model_params)
        # Of the first process that got a signal: one after the last step counts too.
        asked = next((name for name in gather(stop.name) if name is not None), None)
    return ended(setup, workdir, params, asked)


@contextmanager
def start_run(
    setup: Setup, workdir: Path, console: Console, stop: StopRequest, options: StartOptions
) -> Iterator[tuple[LiveRun, TrainState]]:
    """Holds the folder, restores the state or starts from step 0, and opens all that is written; closes it.

    Yields the run and its placed state. Where nothing is left to train, it says so, and opens nothing more.
    """
    experiment, data, training = setup.experiment, setup.data, setup.experiment.training
    report = partial(console.print, soft_wrap=True)
    with (
        hold(workdir, experiment, data, options, partial(keeps_state, setup), report) as held,
        ExitStack() as at_end,  # trackers may wait for a network: they are closed after the checkpoints
        Checkpoints(workdir / CHECKPOINTS, training.keep_checkpoints, report, held.lease) as checkpoints,
    ):
        source = as_urls(options.init_from)
        state, meta = restore_or_start(setup, workdir, held.run, source, checkpoints)
        start = int(state.step)
        if meta is not None and meta.loss is None and start == training.steps:
            meta = meta._replace(unevaluated=True)  # the steps were lowered to where no evaluation was due
        changes = from_first(lambda: open_run(workdir, held.run, experiment, data, start))
        on_first(held.put)  # it is a run's folder before anything else is put there
        announce(console, setup, held.run is None, changes)
        progress = Progress(console, start, training.steps, data.unit)
        run = LiveRun(setup, start, meta, checkpoints, NoLog(), progress, stop)
        if (done := already_done(setup, meta, start)) is not None:
            console.print(done)
            run.is_done = True
            yield run, state
            return
        if start:
            console.print(f"continuing after step {start}")
        begin = partial(Trackers, Start(workdir, experiment, start + 1), report)
        trackers = on_first(lambda: at_end.enter_context(begin()))
        log = partial(MetricsLog, workdir, start, trackers, held.put, run.must_evaluate)
        with log() if is_first() else nullcontext(NoLog()) as run.log, progress:
            yield run, state


def restore_or_start(
    setup: Setup, workdir: Path, run: RunFolder | None, source: str, checkpoints: Checkpoints
) -> tuple[TrainState, Meta | None]:
    """The placed state of the newest checkpoint, or of step 0, and the meta of that checkpoint.

    A run that starts from given parameters, which came from `source`, keeps them in its folder. `run` is what
    `folder.hold` found in `workdir`. All processes must call this.
    """
    strategy = setup.strategy
    shapes = jax.eval_shape(lambda: _draw(setup))
    restored = checkpoints.restore(strategy.restore_target(shapes).to_items())
    if restored is None:
        on_first(lambda: require_checkpoint_if_logged(workdir, run))
        on_first(lambda: _keep(workdir, setup, source))
        return initial_state(setup), None
    state = strategy.from_global(TrainState.from_items(restored.items))
    if lora.lora_of(setup.experiment.model) is not None:
        require_same_base(f"checkpoint {restored.step}", restored.meta, setup.initial_sha256)
        state = state._replace(base=strategy.place(setup.initial))
    found = int(state.step)
    require(found == restored.step, f"step in checkpoint {restored.step}", found, "the step of its folder")
    if not math.isfinite(param_norm(state.params)):
        require_finite(strategy.host_copy(state.params), f"checkpoint {restored.step}")
    return state, restored.meta


def initial_state(setup: Setup) -> TrainState:
    """The placed state of step 0."""
    make, is_lora = setup.strategy.make_state, lora.lora_of(setup.experiment.model) is not None
    if setup.initial is None:
        return make(lambda: _draw(setup))
    given = setup.strategy.place(setup.initial)
    if is_lora:
        return make(lambda: _draw(setup))._replace(base=given)
    return make(lambda params: init_state(params, setup.optimizer), given)


def _draw(setup: Setup) -> TrainState:
    """The state of step 0 before it is placed, without given parameters."""
    adaptation, seed = lora.lora_of(setup.experiment.model), setup.experiment.seed
    if adaptation is None:
        return init_state(init_params(setup.model, seed), setup.optimizer)
    shapes = jax.eval_shape(lambda: setup.initial)
    return init_state(lora.init_factors(adaptation, shapes, seed), setup.optimizer)


def _keep(workdir: Path, setup: Setup, source: str) -> None:
    """Writes the parameters that a run starts from, unless they are drawn or already there."""
    if setup.initial is not None and config.is_run(workdir) and (workdir / BASE).exists():
        return
    for name in (BASE, DESCRIPTION):  # of another start, which was killed before there was a run
        (workdir / name).unlink(missing_ok=True)
    if setup.initial is not None:
        write_base(workdir, setup.initial, setup.initial_sha256, source)


def already_done(setup: Setup, meta: Meta | None, step: int) -> str | None:
    """That nothing is left to train after the checkpoint of `step`, and how to continue; None if there is."""
    training = setup.experiment.training
    if meta is None:
        return None
    has_reached = training.until is not None and meta.reached == training.until
    if has_reached and meta.measured_on == setup.measured_on:
        return f"already reached {training.until} at step {step}; change --training.until to continue"
    if step >= training.steps and not meta.unevaluated:
        return f"already trained to step {step}; raise --training.steps to continue"
    return None


def batches(run: LiveRun) -> Iterator[tuple[int, Batch]]:
    """The number and batch of each further step. If the data end or fail, the steps so far are saved
    first."""
    rows, n_readers = run.rows, run.setup.data.n_readers
    with closing(iterate(rows, run.start, n_readers)) as found:
        while True:
            try:
                with run.clock.waiting():
                    t, batch = next(found)
            except Exception as error:  # the data may be the user's, which can raise anything
                has_ended = isinstance(error, DataEnded)
                # Saving needs all processes, which see the end of the data, but not one another's errors.
                if has_ended or jax.process_count() == 1:
                    run.save.rescue()
                if not has_ended:
                    raise
                steps = run.setup.experiment.training.steps
                raise UserError(
                    f"{error}, before training.steps={steps}; the steps so far are saved: lower"
                    " training.steps, or give an iterator that starts over"
                ) from error
            yield t, batch


def ended(setup: Setup, workdir: Path, params: optax.Params | Adapted, asked: str | None) -> Result:
    """The result of a run whose steps have ended; Interrupted if the signal `asked` stopped it."""
    experiment, data = setup.experiment, setup.data
    if is_first():
        curves = {**data.curves, **{label: label for label in setup.metrics}}
        share(
            draw_learning_curves(workdir, curves if experiment.loss.in_nats else {**curves, "loss": "loss"})
        )
    if asked is not None:
        saved = from_first(lambda: saved_steps(workdir / CHECKPOINTS)[0])
        again = f"hyena-jax train --resume {shlex.quote(as_urls(workdir))}{config.plugin_flags(experiment)}"
        raise Interrupted(
            f"stopped by {asked}; saved at step {saved}. Rerun the command to continue, or run: {again}"
        )
    return Result(setup.model, lora.on_host(experiment.model, params), data)
