"""A run: agree, load, prepare, hold the folder, restore or start, then train; `train` is the whole of it."""

import math
import shlex
from collections.abc import Callable, Generator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from hyena_jax import config, models, parallel
from hyena_jax.config import DataConfig, Experiment, OptimizerConfig, TrackerConfig
from hyena_jax.data import dataset
from hyena_jax.data.dataset import Dataset, Encoding
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
from hyena_jax.system.chips import GIB
from hyena_jax.system.errors import UserError, as_urls, require
from hyena_jax.system.files import memory_size
from hyena_jax.system.signals import Interrupted, StopRequest, stop_requests
from hyena_jax.system.storage.mirror import share
from hyena_jax.system.trees import named_leaves, path_name
from hyena_jax.training import lora
from hyena_jax.training.checkpoint import Checkpoints, saved_steps
from hyena_jax.training.console import Progress, announce
from hyena_jax.training.evaluate import check_target, measured_on
from hyena_jax.training.folder import CHECKPOINTS, hold, kept_encoding, leads_outside, open_run
from hyena_jax.training.loop import Profile, Setup, Step, Trainer, already_done, mapped_train_step
from hyena_jax.training.lora import Adapted
from hyena_jax.training.loss import loss_function, metric_functions
from hyena_jax.training.metrics import MetricsLog, NoLog, draw_learning_curves
from hyena_jax.training.optimizer import have_equal_states, make_optimizer
from hyena_jax.training.start import read_start, restore_or_start
from hyena_jax.training.step import Metrics, TrainState, init_params, init_state, make_eval_step
from hyena_jax.training.trackers import Start, Trackers

T = TypeVar("T")
LoadData = Callable[[DataConfig, Encoding | None], Dataset]


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
    profile: Path | None = None,
    init_from: Path | None = None,
    accept_changed_data: bool = False,
    accept_changed_optimizer: bool = False,
    load_data: LoadData = dataset.load,
    make_progress: Callable[[Console, int, int, str], Progress] = Progress,
    profile_at: tuple[int, ...] = (),
    profile_every: int | None = None,
) -> Result:
    """Trains to `experiment.training.steps`, from the newest checkpoint in `workdir` if there is one.

    All input is checked before `workdir` is touched. Several processes all call this with the same arguments;
    each reads its own rows of every batch, and only the first prints and writes.

    Args:
      profile: folder for `jax.profiler` traces of a few steps: early ones, by default.
      profile_at, profile_every: after these steps, and after every so many, each in a subfolder `step_N`.
      init_from: file of parameters (see `export`), or folder of a run, that a new run starts from; of a
        folder, the tokenizer or normalization too. With LoRA they are the base.
      accept_changed_data: continue although the data changed since the run was started; the new data are
        read with the run's own tokenizer or normalization.
      accept_changed_optimizer: continue although values of the optimizer changed, such as the learning rate;
        what its state holds must not change. The folder keeps from which step on which values held.
      load_data: as `dataset.load`; may return data that were read before.
      make_progress: as `Progress`; the result may show the progress in another way.

    Raises:
      UserError: see `load`, `prepare`, `folder.check_run` and `Checkpoints.restore`.
      Diverged: if the loss or a gradient is not finite.
      Interrupted: after a signal in `signals.STOPPING`, once a step was trained; before that, signals act as
        usual.
    """
    require(profile is None or not profile.is_file(), "profile", str(profile), "a folder, not a file")
    require(profile is not None or not profile_at, "profile_at", profile_at, "absent without profile")
    require(
        profile is not None or not profile_every, "profile_every", profile_every, "absent without profile"
    )
    traces = () if profile is None else (profile, *profile.glob("step_*"))
    leads_out = any(leads_outside(workdir, trace / "plugins" / "profile") for trace in traces)
    require(not leads_out, "profile", str(profile), "no link that leads out of the run folder")
    with stop_requests() as stop:
        console = console if is_first() else Console(quiet=True)
        accepted = {
            "accept_changed_data": accept_changed_data,
            "accept_changed_optimizer": accept_changed_optimizer,
        }
        named = {"workdir": as_urls(workdir.absolute()), "init_from": as_urls(init_from)}
        agree(experiment, **named, **accepted)
        loaded = load(experiment, load_data, workdir, init_from, accept_changed_data)
        setup = prepare(*loaded, console, workdir, init_from)

        def profiled(start: int) -> Profile:
            folder, last = profile if is_first() else None, experiment.training.steps
            return Profile(folder, start, last, profile_at, profile_every)

        run = steps(setup, workdir, console, stop, init_from, make_progress, profiled, **accepted)
        params = _driven(run)
        asked = first_request(stop.name)  # a signal after the last step counts too
    return ended(setup, workdir, params, asked)


def steps(
    setup: Setup,
    workdir: Path,
    console: Console,
    stop: StopRequest,
    init_from: Path | None = None,
    make_progress: Callable[[Console, int, int, str], Progress] = Progress,
    make_profile: Callable[[int], Profile] = lambda start: Profile(None, start, 0),
    accept_changed_data: bool = False,
    accept_changed_optimizer: bool = False,
) -> Generator[Step, tuple[TrainState, Metrics], optax.Params | Adapted]:
    """The steps of a run, from the newest checkpoint in `workdir` if there is one; returns the parameters.

    Yields each step that is due, and is sent what it gives. The folder is held until the generator ends.

    Args:
      make_profile: the profile of a run that starts after this step; the rest is as in `train`.
    """
    experiment, data, training = setup.experiment, setup.data, setup.experiment.training
    accepted = accept_changed_data, accept_changed_optimizer
    keeps, report = partial(keeps_state, setup), partial(console.print, soft_wrap=True)
    with (
        hold(workdir, experiment, data, *accepted, keeps_state=keeps, report=report) as held,
        ExitStack() as at_end,  # trackers may wait for a network: they are closed after the checkpoints
        Checkpoints(workdir / CHECKPOINTS, training.keep_checkpoints, report, held.lease) as checkpoints,
    ):
        run = held.run
        state, meta = restore_or_start(setup, workdir, run, as_urls(init_from), checkpoints)
        start = int(state.step)
        changes = from_first(lambda: open_run(workdir, run, experiment, data, start))
        on_first(held.put)  # it is a run's folder before anything else is put there
        announce(console, setup, run is None, changes)
        if (done := already_done(setup, meta, start)) is not None:
            console.print(done)
            return setup.strategy.host_copy(state.model_params)
        if start:
            console.print(f"continuing after step {start}")
        begin = partial(Trackers, Start(workdir, experiment, start + 1), report)
        trackers = on_first(lambda: at_end.enter_context(begin()))
        with (
            MetricsLog(workdir, start, trackers, held.put) if is_first() else nullcontext(NoLog()) as log,
            make_progress(console, start, training.steps, data.unit) as progress,
            make_profile(start) as trace,
        ):
            trainer = Trainer(setup, checkpoints, log, progress, stop, trace)
            return (yield from trainer.steps(state, meta))


def _driven(run: Generator[Step, tuple[TrainState, Metrics], T]) -> T:
    """What a run returns whose steps are computed as they are due."""
    answer = train_step = None
    while True:
        try:
            due = run.send(answer)
        except StopIteration as end:
            return end.value
        try:
            train_step = train_step or mapped_train_step(due.setup, due.state)
            answer = train_step(due.state, due.batch)
        except BaseException as error:
            run.throw(error)  # which raises it again, once the run has closed its files


def ended(setup: Setup, workdir: Path, params: optax.Params | Adapted, asked: str | None) -> Result:
    """The result of a run whose steps have ended.

    Raises:
      Interrupted: if it was asked to stop by the signal `asked`.
    """
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


def agree(experiment: Experiment, **values: Any) -> None:
    """Raises UserError, on all processes, unless all have equal devices, settings and other JSON values."""
    require_equal_devices()
    encoded = config.encode(experiment)
    digests = [plugin["sha256"] for plugin in encoded.pop("plugins", {}).values()]
    leaves = jax.tree.leaves_with_path(encoded, is_leaf=lambda value: value is None)
    flags = {path_name(path, "."): value for path, value in leaves}
    require_equal({**values, "the plugins' SHA-256": digests, **flags})


def load(
    experiment: Experiment,
    load_data: LoadData = dataset.load,
    workdir: Path | None = None,
    init_from: Path | None = None,
    accept_changed_data: bool = False,
) -> tuple[Experiment, Dataset]:
    """The experiment completed from its data, and the data.

    They are read as an existing run in `workdir` reads them; for a new run, as the run in `init_from` does.

    Raises:
      UserError: if they cannot be read or do not fit the experiment, or processes read different data.
    """

    def read() -> Dataset:
        is_run = workdir is not None and config.is_run(workdir)
        source = workdir if is_run else init_from if init_from is not None and init_from.is_dir() else None
        encoding = None if source is None else kept_encoding(source, experiment)
        if not is_run:
            name, kind = getattr(experiment.data, "tokenizer", None), getattr(encoding, "kind", None)
            require(name is None or kind in (None, name), "data.tokenizer", name, f"{kind!r}, as in {source}")
        with config.own_code("your plugin failed", experiment):
            try:
                return load_data(experiment.data, encoding)
            except UserError:
                if encoding is None or not is_run or accept_changed_data:
                    raise
                # With other symbols; `folder.check_run` then reports that the data changed.
                return load_data(experiment.data, None)

    data = together(read)
    with config.own_code("your plugin failed", experiment):
        experiment = data.complete(experiment)
    agree(experiment, **{"the data's fingerprint": data.fingerprint})
    return experiment, data


def prepare(
    experiment: Experiment,
    data: Dataset,
    console: Console,
    workdir: Path | None = None,
    init_from: Path | None = None,
) -> Setup:
    """Everything that a run is made of, built and checked to fit together; writes nothing.

    Args:
      experiment: completed from `data`.
      workdir: the run's folder; what the run starts from may be kept there.

    Raises:
      UserError: if anything does not fit: see `make_optimizer`, `metric_functions` and `read_start`.
    """
    strategy = parallel.make_strategy(experiment.parallel)
    platform = strategy.devices[0].platform
    if parallel.wants_kernels(experiment.parallel, platform) and not strategy.layout.kernels:
        console.print(f"Pallas kernels are off: {parallel.kernel_fault(platform)}", soft_wrap=True)
    accumulation_steps = experiment.optimizer.accumulation_steps
    check_batch(experiment.data.batch_size, strategy.row_shards, accumulation_steps)
    can_shard = strategy.sequence_axis is None or experiment.model.input_kind.is_tokens
    require(can_shard, "parallel.sequence", experiment.parallel.sequence, "1 unless the model reads tokens")
    with config.own_code("your plugin failed", experiment):
        model = models.build(experiment.model, strategy.sequence_axis, strategy.layout)
        shapes = jax.eval_shape(lambda: init_params(model, experiment.seed))
        loss, metrics = loss_function(experiment.loss), metric_functions(experiment, data)
        for tracker in experiment.logging.all_trackers:
            TrackerConfig.registry.target(type(tracker))  # refuses one whose package is missing
        for name, leaf in named_leaves(shapes).items():
            is_real = jnp.issubdtype(leaf.dtype, jnp.floating)
            must = "real floating point (keep a complex one as two)"
            require(is_real, f"the dtype of parameter {name}", leaf.dtype.name, must)
        batch = next(data.eval_batches(strategy.row_shards, 1))
        if "positions" in batch:  # they would lie on other devices than the tokens that they name
            must = "1 with data that score single positions"
            require(strategy.sequence_axis is None, "parallel.sequence", experiment.parallel.sequence, must)
        bare = make_eval_step(models.build(experiment.model), loss, metrics, data.tallies)
        if "segment_ids" in batch:  # some mixers cannot keep documents apart
            try:
                jax.eval_shape(bare, shapes, batch)
            except ValueError as error:
                pattern = ", ".join(
                    dict.fromkeys(map(config.name_of, getattr(experiment.model, "pattern", ())))
                )
                raise UserError(
                    f"data.documents must be False with model.pattern {pattern} (or of mixers that keep"
                    f" documents apart, such as hawk): {error}"
                ) from error
        if config.plugins_in(experiment):  # parts that do not fit fail when they are traced
            jax.eval_shape(bare, shapes, batch)
            pattern = getattr(experiment.model, "pattern", ())
            if pattern and all(part.causal for part in pattern) and models.decodes_by_state(model):
                models.check_decoding(models.build(experiment.model), shapes)
            models.check_consistency(experiment.model)
        if experiment.training.until is not None:
            check_target(experiment.training.until, data, bare, shapes, batch)
        strategy.check(make_eval_step(model, loss, metrics), shapes, batch)
        adaptation, trained, optimizer_config = lora.lora_of(experiment.model), shapes, experiment.optimizer
        if adaptation is not None:
            trained = jax.eval_shape(lambda: lora.init_factors(adaptation, shapes, 0))
            optimizer_config = lora.for_factors(optimizer_config)
        optimizer = make_optimizer(optimizer_config, trained, experiment.training.steps)
        state = jax.eval_shape(partial(init_state, optimizer=optimizer), trained)
        _check_capacity(experiment, strategy, state if adaptation is None else (state, shapes), batch)
    report = partial(console.print, soft_wrap=True)
    initial, sha256 = together(lambda: read_start(experiment, shapes, workdir, init_from, report))
    rows = measured_on(data, experiment.training.eval_windows)
    return Setup(experiment, data, strategy, model, trained, optimizer, loss, metrics, initial, sha256, rows)


def keeps_state(setup: Setup, earlier: OptimizerConfig) -> bool:
    """Whether a run can continue from the optimizer state of an earlier start."""
    experiment = setup.experiment
    if type(earlier) is not type(experiment.optimizer):
        return False
    if lora.lora_of(experiment.model) is not None:
        earlier = lora.for_factors(earlier)
    before = make_optimizer(earlier, setup.shapes, experiment.training.steps)
    return have_equal_states(before, setup.optimizer, setup.shapes)


def _check_capacity(experiment: Experiment, strategy: Strategy, state: Any, batch: Any) -> None:
    """Refuses a run whose state, or the activations of one of its layers, exceed the memory.

    Both are lower bounds, so no run is refused that could fit. Only the memory of CPUs is checked.

    Args:
      state: shapes of the state before the first step.
      batch: a batch of any size, with rows like all others.

    Raises:
      UserError: it names what to lower.
    """
    if strategy.devices[0].platform != "cpu":
        return
    memory = memory_size()
    local = sum(device.process_index == jax.process_index() for device in strategy.devices)
    # pmap keeps a copy on each device; a mesh, at least one over all processes together.
    copies = local if strategy.axis_name is not None else local / len(strategy.devices)
    size = copies * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    allowed = f"at most the {memory / GIB:.1f} GiB of memory; lower model.max_len, a width or n_layers"
    require(size <= memory, "parameters and optimizer state", f"{size / GIB:.1f} GiB", allowed)
    row = batch["inputs"].shape[1:]
    numbers = math.prod(row)
    if experiment.model.input_kind.is_tokens and hasattr(experiment.model, "d_model"):
        numbers = max(numbers, row[0] * experiment.model.d_model)  # the residual stream
    parts = strategy.row_shard.times * experiment.optimizer.accumulation_steps
    most = int(memory / (2 * numbers)) * parts  # in bfloat16
    must = f"at most {most}, so that the activations of a layer fit {memory / GIB:.1f} GiB of memory"
    require(experiment.data.batch_size <= most, "data.batch_size", experiment.data.batch_size, must)
