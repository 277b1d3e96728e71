"""A run: agree, load, prepare, hold the folder, restore or start, then train; `train` is the whole of it."""

import math
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from hyena_jax import config, models, parallel
from hyena_jax.config import DataConfig, Experiment, UserError, memory_size, require
from hyena_jax.data import dataset
from hyena_jax.data.dataset import Dataset, Encoding
from hyena_jax.parallel.processes import (
    first_request,
    from_first,
    is_first,
    require_equal,
    require_equal_devices,
    together,
)
from hyena_jax.parallel.strategy import Strategy, check_batch
from hyena_jax.signals import Interrupted, stop_requests
from hyena_jax.training import lora
from hyena_jax.training.checkpoint import Checkpoints, saved_steps
from hyena_jax.training.console import Progress, announce
from hyena_jax.training.evaluate import check_target, measured_on
from hyena_jax.training.folder import CHECKPOINTS, hold, kept_encoding, leads_outside, open_run
from hyena_jax.training.loop import Profile, Setup, Trainer, already_done
from hyena_jax.training.loss import loss_function, metric_functions
from hyena_jax.training.metrics import MetricsLog, NoLog, draw_learning_curves
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.start import read_start, restore_or_start
from hyena_jax.training.step import init_params, init_state, make_eval_step
from hyena_jax.trees import named_leaves, path_name

GIB = 2**30
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
    load_data: LoadData = dataset.load,
    make_progress: Callable[[Console, int, int, str], Progress] = Progress,
) -> Result:
    """Trains to `experiment.training.steps`, from the newest checkpoint in `workdir` if there is one.

    All input is checked before `workdir` is touched. Several processes all call this with the same arguments;
    each reads its own rows of every batch, and only the first prints and writes.

    Args:
      profile: folder for a `jax.profiler` trace of a few steps.
      init_from: file of parameters (see `export`), or folder of a run, that a new run starts from; of a
        folder, the tokenizer or normalization too. With LoRA they are the base.
      accept_changed_data: continue although the data changed since the run was started; the new data are
        read with the run's own tokenizer or normalization.
      load_data: as `dataset.load`; may return data that were read before.
      make_progress: as `Progress`; the result may show the progress in another way.

    Raises:
      UserError: see `load`, `prepare`, `folder.check_run` and `Checkpoints.restore`.
      Diverged: if the loss or a gradient is not finite.
      Interrupted: after a signal in `signals.STOPPING`, once a step was trained; before that, signals act as
        usual.
    """
    require(profile is None or not profile.is_file(), "profile", str(profile), "a folder, not a file")
    leads_out = profile is not None and leads_outside(workdir, profile / "plugins" / "profile")
    require(not leads_out, "profile", str(profile), "no link that leads out of the run folder")
    with stop_requests() as stop:
        console = console if is_first() else Console(quiet=True)
        given = {"init_from": str(init_from), "accept_changed_data": accept_changed_data}
        agree(experiment, workdir=str(workdir.absolute()), **given)
        experiment, data = load(experiment, load_data, workdir, init_from, accept_changed_data)
        setup = prepare(experiment, data, console, workdir, init_from)
        training = experiment.training
        with (
            hold(workdir, experiment, data, accept_changed_data) as run,
            Checkpoints(workdir / CHECKPOINTS, training.keep_checkpoints, console.print) as checkpoints,
        ):
            state, meta = restore_or_start(setup, workdir, run, str(init_from), checkpoints)
            changes = from_first(lambda: open_run(workdir, run, experiment, data))
            announce(console, setup, run is None, changes)
            start = int(state.step)
            if (done := already_done(setup, meta, start)) is not None:
                console.print(done)
                params = setup.strategy.host_copy(state.model_params)
            else:
                if start:
                    console.print(f"continuing after step {start}")
                tensorboard = experiment.logging.tensorboard
                with (
                    MetricsLog(workdir, start, tensorboard) if is_first() else nullcontext(NoLog()) as log,
                    make_progress(console, start, training.steps, data.unit) as progress,
                    Profile(profile if is_first() else None, start, training.steps) as trace,
                ):
                    params = Trainer(setup, checkpoints, log, progress, stop, trace).run(state, meta)
        asked = first_request(stop.name)  # a signal after the last step counts too
    if is_first():
        curves = {**data.curves, **{label: label for label in setup.metrics}}
        draw_learning_curves(workdir, curves if experiment.loss.in_nats else {**curves, "loss": "loss"})
    if asked is not None:
        saved = from_first(lambda: saved_steps(workdir / CHECKPOINTS)[0])
        again = f"hyena-jax train --resume {shlex.quote(str(workdir))}{config.plugin_flags(experiment)}"
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
        try:
            return load_data(experiment.data, encoding)
        except UserError:
            if encoding is None or not is_run or accept_changed_data:
                raise
            # With other symbols; `folder.check_run` then reports that the data changed.
            return load_data(experiment.data, None)

    with config.own_code("your plugin failed", experiment):
        data = together(read)
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
        for name, leaf in named_leaves(shapes).items():
            is_real = jnp.issubdtype(leaf.dtype, jnp.floating)
            must = "real floating point (keep a complex one as two)"
            require(is_real, f"the dtype of parameter {name}", leaf.dtype.name, must)
        batch = next(data.eval_batches(strategy.row_shards, 1))
        if "positions" in batch:  # they would lie on other devices than the tokens that they name
            must = "1 with data that score single positions"
            require(strategy.sequence_axis is None, "parallel.sequence", experiment.parallel.sequence, must)
        bare = make_eval_step(models.build(experiment.model), loss, metrics, data.tallies)
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
    parts = strategy.row_shard.count * experiment.optimizer.accumulation_steps
    most = int(memory / (2 * numbers)) * parts  # in bfloat16
    must = f"at most {most}, so that the activations of a layer fit {memory / GIB:.1f} GiB of memory"
    require(experiment.data.batch_size <= most, "data.batch_size", experiment.data.batch_size, must)
