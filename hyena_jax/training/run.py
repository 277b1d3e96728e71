"""A run: its parts loaded, checked and placed on the devices, its folder locked, then trained."""

import math
import shlex
from collections.abc import Callable, Sequence
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
from hyena_jax.data.dataset import Dataset, Encoding, load
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
from hyena_jax.signals import Interrupted, stop_requests
from hyena_jax.training import lora
from hyena_jax.training.checkpoint import Best, Checkpoints, best, is_same_measure, saved_steps
from hyena_jax.training.console import Progress, parameter_table
from hyena_jax.training.evaluate import check_target
from hyena_jax.training.folder import (
    CHECKPOINTS,
    hold_folder,
    kept_encoding,
    leads_outside,
    open_run,
    read_initial,
    require_checkpoint_if_logged,
    require_finite,
    require_same_base,
)
from hyena_jax.training.loop import REACHED, UNEVALUATED, Profile, Setup, Trainer, all_finite
from hyena_jax.training.loss import loss_function, metric_functions
from hyena_jax.training.metrics import MetricsLog, NoLog, draw_learning_curves
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import TrainState, init_params, init_state, make_eval_step
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
    load_data: LoadData = load,
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
      load_data: as `load`; may return data that were read before.
      make_progress: as `Progress`; the result may show the progress in another way.

    Raises:
      UserError: see `load`, `Dataset.complete`, `make_optimizer`, `check_run` and `Checkpoints.restore`.
      Diverged: if the loss or a gradient is not finite.
      Interrupted: after a signal in `signals.STOPPING`, once a step was trained; before that, signals
        act as usual.
    """
    require(profile is None or not profile.is_file(), "profile", str(profile), "a folder, not a file")
    leads_out = profile is not None and leads_outside(workdir, profile / "plugins" / "profile")
    require(not leads_out, "profile", str(profile), "no link that leads out of the run folder")
    with stop_requests() as stop:
        console = console if is_first() else Console(quiet=True)
        require_equal_devices()
        arguments = {"workdir": str(workdir.absolute()), "init_from": str(init_from)}
        arguments["accept_changed_data"] = accept_changed_data
        require_equal({**arguments, **_settings(experiment)})
        experiment, data = _load(experiment, workdir, init_from, accept_changed_data, load_data)
        setup = _check(experiment, data, console, workdir, init_from)
        training, folder = experiment.training, workdir / CHECKPOINTS
        with (
            hold_folder(workdir, experiment, data, accept_changed_data) as previous,
            Checkpoints(folder, training.keep_checkpoints, console.print) as checkpoints,
        ):
            state, meta = _place(setup, checkpoints)
            if not meta:
                on_first(lambda: require_checkpoint_if_logged(workdir, previous))
                on_first(lambda: _keep_initial(workdir, setup, str(init_from)))
            changes = from_first(lambda: open_run(workdir, previous, experiment, data))
            _announce(console, setup, previous is None, changes)
            start = int(state.step)
            has_reached = training.until is not None and meta.get(REACHED) == training.until
            has_reached &= is_same_measure(meta.get("measured_on"), setup.measured_on)
            if (start >= training.steps and not meta.get(UNEVALUATED)) or has_reached:
                done, change = f"trained to step {start}", "raise --training.steps"
                if has_reached:
                    done, change = f"reached {training.until} at step {start}", "change --training.until"
                console.print(f"already {done}; {change} to continue")
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
                    found = Best(*from_first(lambda: best(folder)))
                    is_same = is_same_measure(found.measured_on, setup.measured_on)
                    best_loss = found.loss if is_same else math.inf
                    trainer = Trainer(setup, checkpoints, log, progress, best_loss)
                    params = trainer.run(state, start, meta, stop, trace)
        asked = first_request(stop.name)  # a signal after the last step counts too
    if is_first():
        curves = {**data.curves, **{label: label for label in setup.metrics}}
        draw_learning_curves(workdir, curves if experiment.loss.in_nats else {**curves, "loss": "loss"})
    if asked is not None:
        saved = from_first(lambda: saved_steps(folder)[0])
        again = f"hyena-jax train --resume {shlex.quote(str(workdir))}{config.plugin_flags(experiment)}"
        raise Interrupted(
            f"stopped by {asked}; saved at step {saved}. Rerun the command to continue, or run: {again}"
        )
    return Result(setup.model, lora.on_host(experiment.model, params), data)


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Every value of an experiment, by the name of its flag; for plugins only their digests."""
    encoded = config.encode(experiment)
    digests = [plugin["sha256"] for plugin in encoded.pop("plugins", {}).values()]
    leaves = jax.tree.leaves_with_path(encoded, is_leaf=lambda value: value is None)
    return {"the plugins' SHA-256": digests, **{path_name(path, "."): value for path, value in leaves}}


def prepare(experiment: Experiment, load_data: LoadData = load) -> Setup:
    """Everything that a new run of this experiment is made of, checked as `train` checks it."""
    with config.own_code("your plugin failed", experiment):
        data = load_data(experiment.data, None)
        experiment = data.complete(experiment)
    return _check(experiment, data, Console(quiet=True))


def _load(
    experiment: Experiment,
    workdir: Path,
    init_from: Path | None,
    accept_changed_data: bool,
    load_data: LoadData,
) -> tuple[Experiment, Dataset]:
    """The data, and the experiment completed from them.

    They are read as an existing run in `workdir` reads them; for a new run, as the run in `init_from` does.
    """

    def load_kept() -> Dataset:
        if init_from is not None and init_from.is_dir() and not config.is_run(workdir):
            encoding = kept_encoding(init_from, experiment)
            name, kind = getattr(experiment.data, "tokenizer", None), getattr(encoding, "kind", None)
            require(
                name is None or kind in (None, name), "data.tokenizer", name, f"{kind!r}, as in {init_from}"
            )
            return load_data(experiment.data, encoding)
        encoding = kept_encoding(workdir, experiment)
        try:
            return load_data(experiment.data, encoding)
        except UserError:
            if encoding is None or accept_changed_data:
                raise
            # With other symbols; `check_run` then reports that the data changed.
            return load_data(experiment.data, None)

    with config.own_code("your plugin failed", experiment):
        data = together(load_kept)
        experiment = data.complete(experiment)
    require_equal({"the data's fingerprint": data.fingerprint, **_settings(experiment)})
    return experiment, data


def _check(
    experiment: Experiment,
    data: Dataset,
    console: Console,
    workdir: Path | None = None,
    init_from: Path | None = None,
) -> Setup:
    """Builds everything that does not depend on the run's checkpoints, and checks that it fits together."""
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
    initial, sha256 = together(lambda: _initial(experiment, shapes, workdir, init_from, report))
    return Setup(experiment, data, strategy, model, trained, optimizer, loss, metrics, initial, sha256)


def _initial(
    experiment: Experiment,
    shapes: optax.Params,
    workdir: Path | None,
    init_from: Path | None,
    report: Callable[[str], None],
) -> tuple[optax.Params | None, str | None]:
    """The parameters that a run starts from, or None to draw them; with LoRA, the base and its digest.

    A run without a checkpoint starts once more from what its folder kept: the source may have changed.

    Raises:
      UserError: if they cannot be read or do not fit the model, or LoRA has no base.
    """
    is_run = workdir is not None and config.is_run(workdir)
    if is_run and config.identity_differences(experiment, config.read_run(workdir)):
        return None, None  # `check_run` refuses the folder
    if lora.lora_of(experiment.model) is None:
        if is_run:
            if saved_steps(workdir / CHECKPOINTS):
                return None, None
            if lora.has_base(workdir):
                return lora.read_base(workdir, shapes, report)[0], None
        return (None if init_from is None else read_initial(init_from, shapes, report)), None
    if is_run:
        return lora.read_base(workdir, shapes, report)
    must = "a run's folder or a file from `export`, the base that model.lora.rank adapts"
    require(init_from is not None, "init_from", init_from, must)
    params = read_initial(init_from, shapes, report)
    return params, lora.digest(params)


def _keep_initial(workdir: Path, setup: Setup, source: str) -> None:
    """Writes the parameters that a run starts from, unless they are drawn or already there."""
    if setup.initial is None:
        lora.remove_base(workdir)  # of another start, which was killed before there was a run
    elif not (config.is_run(workdir) and lora.has_base(workdir)):
        sha256 = setup.base_sha256 or lora.digest(setup.initial)
        lora.write_base(workdir, setup.initial, sha256, source)


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


def _place(setup: Setup, checkpoints: Checkpoints) -> tuple[TrainState, dict[str, Any]]:
    """The placed state of the newest checkpoint, or of step 0; and the meta of that checkpoint, or {}."""
    strategy, initial, seed = setup.strategy, setup.initial, setup.experiment.seed
    adaptation = lora.lora_of(setup.experiment.model)

    def make() -> TrainState:
        if adaptation is None:
            return init_state(init_params(setup.model, seed), setup.optimizer)
        return init_state(lora.init_factors(adaptation, shapes, seed), setup.optimizer)

    shapes = jax.eval_shape(lambda: initial)
    restored = checkpoints.restore(strategy.restore_target(jax.eval_shape(make)).to_items())
    if restored is None:
        state = strategy.make_state(make)
        if initial is None:
            return state, {}
        name = "params" if adaptation is None else "base"
        return state._replace(**{name: strategy.place(initial)}), {}
    state = strategy.from_global(TrainState.from_items(restored.items))
    if adaptation is not None:
        require_same_base(f"checkpoint {restored.step}", restored.meta, setup.base_sha256)
        state = state._replace(base=strategy.place(initial))
    found = int(state.step)
    require(found == restored.step, f"step in checkpoint {restored.step}", found, "the step of its folder")
    if not all_finite(state.params):
        require_finite(strategy.host_copy(state.params), f"checkpoint {restored.step}")
    return state, restored.meta


def _announce(console: Console, setup: Setup, is_new: bool, changes: Sequence[str]) -> None:
    """Prints what will be trained, on which data and devices, and what changed since the last start."""
    experiment, devices, processes = setup.experiment, setup.strategy.devices, jax.process_count()
    if is_new:
        adaptation = lora.lora_of(experiment.model)
        optimizer = experiment.optimizer if adaptation is None else lora.for_factors(experiment.optimizer)
        console.print(parameter_table(setup.shapes, optimizer))
        if adaptation is not None:
            n_base = sum(leaf.size for leaf in jax.tree.leaves(setup.initial))
            console.print(f"LoRA      the {n_base:,} parameters of the base stay as they are")
    lacks = models.lacks(setup.model) if experiment.model.input_kind.is_tokens else []
    if lacks:
        console.print(f"this model has no {'; no '.join(lacks)}", soft_wrap=True)
    console.print(f"data      {setup.data.source}")
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
