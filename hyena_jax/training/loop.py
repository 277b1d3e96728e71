"""A run: its input checked, its folder locked, its state restored, then trained on."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import optax
from rich.console import Console

from hyena_jax import config, models, parallel
from hyena_jax.config import Experiment, UserError, require
from hyena_jax.data.dataset import Dataset, load
from hyena_jax.parallel.processes import (
    first_request,
    from_first,
    is_first,
    on_first,
    require_equal,
    require_equal_devices,
    together,
)
from hyena_jax.parallel.strategy import Strategy, check_batch
from hyena_jax.training import export
from hyena_jax.training.capacity import check_capacity
from hyena_jax.training.checkpoint import Checkpoints, best, saved_steps
from hyena_jax.training.metrics import FILE, MetricsLog, NoLog, draw_learning_curves, read_rows
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.profiling import Profile
from hyena_jax.training.progress import Progress, parameter_table
from hyena_jax.training.run_folder import (
    CHECKPOINTS,
    Run,
    check_run,
    kept_encoding,
    leads_outside,
    locked,
    open_run,
    require_finite,
)
from hyena_jax.training.scores import Score, loss_function, metric_functions
from hyena_jax.training.signals import Interrupted, StopRequest, stop_requests
from hyena_jax.training.step import TrainState, init_params, init_state, make_eval_step, make_train_step
from hyena_jax.training.trainer import Trainer, all_finite
from hyena_jax.trees import path_name


class Result(NamedTuple):
    """What a finished run leaves in memory of every process."""

    model: nn.Module
    params: optax.Params
    """NumPy arrays."""
    data: Dataset


class Prepared(NamedTuple):
    """All that a run is made of, before its folder is touched."""

    experiment: Experiment
    """With what the model takes from the data filled in."""
    data: Dataset
    strategy: Strategy
    model: nn.Module
    shapes: optax.Params
    """Of the parameters."""
    optimizer: optax.GradientTransformation
    loss: Score
    metrics: dict[str, Score]
    """In addition to what the data give by themselves."""
    given: optax.Params | None
    """What a new run starts from, where that is not drawn."""


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
      Interrupted: after one of `signals.STOPPING`, once a step was trained; before that, they act as usual.
    """
    require(profile is None or not profile.is_file(), "profile", str(profile), "a folder, not a file")
    leads_out = profile is not None and leads_outside(workdir, profile / "plugins" / "profile")
    require(not leads_out, "profile", str(profile), "no link that leads out of the run folder")
    with stop_requests() as stop:
        console = console if is_first() else Console(quiet=True)
        require_equal_devices()
        given = {"init_from": str(init_from), "accept_changed_data": accept_changed_data}
        require_equal({"workdir": str(workdir.absolute()), **given, **_settings(experiment)})
        prepared = _prepare(experiment, workdir, console, init_from, accept_changed_data)

        def check() -> Run | None:
            return check_run(workdir, prepared.experiment, prepared.data, accept_changed_data)

        on_first(check)
        with ExitStack() as stack:
            on_first(lambda: stack.enter_context(locked(workdir)))
            run = on_first(check)  # from here on nobody else changes it
            params = _run(prepared, workdir, run, console, profile, stop)
        stop.name = first_request(stop.name)  # one that came after the last step counts too
    if is_first():
        draw_learning_curves(workdir, _curves(prepared))
    if stop.is_set:
        saved = from_first(lambda: saved_steps(workdir / CHECKPOINTS)[0])
        again = f"hyena-jax train --resume {shlex.quote(str(workdir))}"
        raise Interrupted(
            f"stopped by {stop.name}; saved at step {saved}: rerun the command to continue, or {again}"
        )
    return Result(prepared.model, params, prepared.data)


def _prepare(
    experiment: Experiment,
    workdir: Path,
    console: Console,
    init_from: Path | None,
    accept_changed_data: bool,
) -> Prepared:
    """Checks all that the folder does not decide."""
    with _own_parts(experiment):
        data = together(lambda: _load(experiment, workdir, accept_changed_data))
        experiment = data.complete(experiment)
    require_equal({"the data's fingerprint": data.fingerprint, **_settings(experiment)})
    strategy = parallel.make_strategy(experiment.parallel)
    accumulation_steps = experiment.optimizer.accumulation_steps
    check_batch(experiment.data.batch_size, strategy.row_shards, accumulation_steps)
    is_text = experiment.model.inputs == "tokens"
    can_shard = strategy.sequence_axis is None or is_text
    require(can_shard, "parallel.sequence", experiment.parallel.sequence, "1 unless the model reads tokens")
    with _own_parts(experiment):
        model = models.build(experiment.model, strategy.sequence_axis)
        shapes = jax.eval_shape(lambda: init_params(model, experiment.seed))
        loss, metrics = loss_function(experiment.loss), metric_functions(experiment, data)
        batch = next(data.eval_batches(strategy.row_shards, 1))
        if config.plugins_in(experiment):  # what does not fit shows when it is traced
            jax.eval_shape(make_eval_step(models.build(experiment.model), loss, metrics), shapes, batch)
        strategy.check(make_eval_step(model, loss, metrics), shapes, batch)
        optimizer = make_optimizer(experiment.optimizer, shapes, experiment.training.steps)
        state = jax.eval_shape(partial(init_state, optimizer=optimizer), shapes)
        check_capacity(experiment, strategy, state, batch)
    report = partial(console.print, soft_wrap=True)
    given = None if init_from is None else together(lambda: export.read(init_from, shapes, report))
    return Prepared(experiment, data, strategy, model, shapes, optimizer, loss, metrics, given)


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Every value of an experiment by its path, as its flag is named; of plugins, their code alone."""
    encoded = config.encode(experiment)
    digests = [plugin["sha256"] for plugin in encoded.pop("plugins", {}).values()]
    leaves = jax.tree.leaves_with_path(encoded, is_leaf=lambda value: value is None)
    names = {path_name(path, "."): value for path, value in leaves}
    return {"the plugins' SHA-256": digests, **names}


@contextmanager
def _own_parts(experiment: Experiment) -> Iterator[None]:
    """Faults in parts of the user's own are wrong input; without such parts, an error keeps its traceback."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        if not config.plugins_in(experiment):
            raise
        raise UserError(f"a part of your own failed: {config.describe_fault(error)}") from error


def _load(experiment: Experiment, workdir: Path, accept_changed_data: bool) -> Dataset:
    """The data, read as a run that is there reads them."""
    encoding = kept_encoding(workdir, experiment)
    try:
        return load(experiment.data, encoding)
    except UserError:
        if encoding is None or accept_changed_data:
            raise
        return load(experiment.data)  # other symbols: `check_run` says that the data changed


def _run(
    prepared: Prepared,
    workdir: Path,
    run: Run | None,
    console: Console,
    profile: Path | None,
    stop: StopRequest,
) -> optax.Params:
    """Trains in the folder that is locked, and was found to hold `run`; returns the parameters at the end."""
    experiment, data, strategy = prepared.experiment, prepared.data, prepared.strategy
    training, folder = experiment.training, workdir / CHECKPOINTS
    on_first(lambda: read_rows(workdir / FILE))  # refuses a file that the log could not continue
    with Checkpoints(folder, training.keep_checkpoints, console.print) as checkpoints:
        state, data_state = _restore_or_make(checkpoints, prepared)
        changes = from_first(lambda: open_run(workdir, run, experiment, data))
        _announce(console, prepared, run is None, changes)
        start = int(state.step)
        if start >= training.steps:
            console.print(f"already trained to step {start}; a larger --training.steps goes on")
            return strategy.host_copy(state.params)
        if start:
            console.print(f"continuing after step {start}")
        with (
            _metrics_log(workdir, start, experiment) as log,
            Progress(console, start, training.steps, data.unit) as progress,
            Profile(profile if is_first() else None, start, training.steps) as trace,
        ):
            trainer = Trainer(
                experiment=experiment,
                data=data,
                strategy=strategy,
                train_step=_mapped_train_step(prepared, state),
                eval_step=strategy.map_eval_step(
                    make_eval_step(prepared.model, prepared.loss, prepared.metrics)
                ),
                checkpoints=checkpoints,
                log=log,
                progress=progress,
                best_loss=from_first(lambda: best(folder).loss),
                data_state=data_state,
            )
            return trainer.run(state, start, stop, trace)


def _mapped_train_step(prepared: Prepared, state: TrainState) -> Callable:
    experiment, strategy = prepared.experiment, prepared.strategy
    parts = experiment.optimizer.accumulation_steps
    step = make_train_step(
        prepared.model,
        prepared.optimizer,
        experiment.seed,
        strategy.axis_name,
        parts,
        prepared.loss,
        prepared.metrics,
    )
    return strategy.map_train_step(step, jax.eval_shape(lambda: state))


def _curves(prepared: Prepared) -> dict[str, str]:
    """The metrics that are drawn against the step, and what their axes say."""
    curves = {**prepared.data.curves, **{label: label for label in prepared.metrics}}
    return curves if prepared.experiment.loss.in_nats else {**curves, "loss": "loss"}


def _announce(console: Console, prepared: Prepared, is_new: bool, changes: Sequence[str]) -> None:
    """What is about to be trained, on what, and what is different from the last start."""
    experiment, devices, processes = prepared.experiment, prepared.strategy.devices, jax.process_count()
    if is_new:
        console.print(parameter_table(prepared.shapes, experiment.optimizer))
    lacks = models.lacks(prepared.model) if experiment.model.inputs == "tokens" else []
    if lacks:
        console.print(f"this model has no {'; no '.join(lacks)}", soft_wrap=True)
    console.print(f"data      {prepared.data.source}")
    among = f" in {processes} processes" if processes > 1 else ""
    console.print(f"devices   {len(devices)} x {devices[0].device_kind}{among}")
    for change in changes:
        console.print(f"changed since the last start: {change}", soft_wrap=True)
        decay_steps = getattr(experiment.optimizer.schedule, "decay_steps", 0)
        if change.startswith("training.steps") and decay_steps is None:
            console.print(
                "the learning rate now decays until the new last step (optimizer.schedule.decay_steps)",
                soft_wrap=True,
            )


def _metrics_log(workdir: Path, step: int, experiment: Experiment) -> AbstractContextManager:
    if is_first():
        return MetricsLog(workdir, step, experiment.logging.tensorboard)
    return nullcontext(NoLog())


def _restore_or_make(checkpoints: Checkpoints, prepared: Prepared) -> tuple[TrainState, Any]:
    """The placed state of the newest checkpoint; or that before the first step, with the parameters given.

    And the state of the data, where the checkpoint holds one.
    """
    strategy, given = prepared.strategy, prepared.given

    def make() -> TrainState:
        params = init_params(prepared.model, prepared.experiment.seed)
        return init_state(params, prepared.optimizer)

    restored = checkpoints.restore(strategy.restore_target(jax.eval_shape(make)).to_items())
    if restored is None:
        state = strategy.make_state(make)
        return (state if given is None else state._replace(params=strategy.place(given))), None
    state = strategy.from_global(TrainState.from_items(restored.items))
    found = int(state.step)
    require(found == restored.step, f"step in checkpoint {restored.step}", found, "that of its folder")
    if not all_finite(state.params):
        require_finite(strategy.host_copy(state.params), f"checkpoint {restored.step}")
    return state, restored.meta.get("data_state")
