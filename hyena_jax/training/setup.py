"""What a run is made of, built and checked before its folder is touched."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from hyena_jax import config, models, parallel
from hyena_jax.config import DataConfig, Experiment, OptimizerConfig, TrackerConfig
from hyena_jax.data import dataset
from hyena_jax.data.dataset import Dataset, Encoding
from hyena_jax.parallel.processes import on_all, require_equal, require_equal_devices
from hyena_jax.parallel.strategy import Strategy, check_batch
from hyena_jax.system.chips import GIB
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import memory_size
from hyena_jax.system.trees import named_leaves, path_name
from hyena_jax.training import lora
from hyena_jax.training.evaluate import check_target, measured_on
from hyena_jax.training.folder import kept_encoding
from hyena_jax.training.initial import read_initial
from hyena_jax.training.loss import Score, loss_function, metric_functions
from hyena_jax.training.optimizer import have_equal_states, make_optimizer
from hyena_jax.training.options import NO_OPTIONS, StartOptions
from hyena_jax.training.step import TrainState, init_params, init_state, make_eval_step, make_train_step

LoadData = Callable[[DataConfig, Encoding | None], Dataset]
"""As `dataset.load`; may return data that were read before."""


class Setup(NamedTuple):
    """Everything that a run is made of, before its folder is touched."""

    experiment: Experiment
    """With the fields filled in that the model takes from the data."""
    data: Dataset
    strategy: Strategy
    model: nn.Module
    trained_shapes: optax.Params
    """Shapes of the parameters that are trained."""
    optimizer: optax.GradientTransformation
    loss: Score
    metrics: dict[str, Score]
    """The metrics of the experiment and of its data, by label."""
    initial: optax.Params | None
    """Initial parameters of a new run, if they are not drawn at random; with LoRA always the base."""
    initial_sha256: str | None
    """Their digest, see `initial.digest`."""
    measured_on: str
    """The held-out rows that evaluations read, see `evaluate.measured_on`."""


def agree(experiment: Experiment, **values: Any) -> None:
    """Raises UserError, on all processes, unless all have equal devices, settings and other JSON values."""
    require_equal_devices()
    encoded = config.encode(experiment)
    digests = [plugin["sha256"] for plugin in encoded.pop("plugins", {}).values()]
    leaves = jax.tree.leaves_with_path(encoded, is_leaf=lambda value: value is None)
    flags = {path_name(path, "."): value for path, value in leaves}
    require_equal({**values, "the plugins' SHA-256": digests, **flags})


def make_setup(
    experiment: Experiment,
    console: Console,
    workdir: Path | None = None,
    options: StartOptions = NO_OPTIONS,
    load_data: LoadData = dataset.load,
) -> Setup:
    """Reads the data and builds everything that a run is made of, checked to fit together; writes nothing.

    All processes must call this. If `workdir` holds a run, its data are read as before, and what it starts
    from may be kept there.
    """
    experiment, data = _with_data(experiment, workdir, options, load_data)
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
        if "weights" in batch:
            some = data.eval_batches(strategy.row_shards, experiment.training.eval_windows)
            has_weight = any(np.any(found["weights"]) for found in some)
            require(has_weight, "the sum of the weights of held-out targets", 0, "above 0")
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
    initial, sha256 = on_all(lambda: read_initial(experiment, shapes, workdir, options.init_from, report))
    rows = measured_on(data, experiment.training.eval_windows)
    return Setup(experiment, data, strategy, model, trained, optimizer, loss, metrics, initial, sha256, rows)


def keeps_state(setup: Setup, earlier: OptimizerConfig) -> bool:
    """Whether a run can continue from the optimizer state of an earlier start."""
    experiment = setup.experiment
    if type(earlier) is not type(experiment.optimizer):
        return False
    if lora.lora_of(experiment.model) is not None:
        earlier = lora.for_factors(earlier)
    before = make_optimizer(earlier, setup.trained_shapes, experiment.training.steps)
    return have_equal_states(before, setup.optimizer, setup.trained_shapes)


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


def mapped_eval_step(setup: Setup) -> Callable:
    """`make_eval_step` over the devices."""
    step = make_eval_step(setup.model, setup.loss, setup.metrics, setup.data.tallies)
    return setup.strategy.map_eval_step(step)


def _with_data(
    experiment: Experiment, workdir: Path | None, options: StartOptions, load_data: LoadData
) -> tuple[Experiment, Dataset]:
    """The experiment completed from its data, and the data, which must be the same in all processes.

    They are read as an existing run in `workdir` reads them; for a new run, as the run in `init_from` does.
    """

    def read() -> Dataset:
        given = options.init_from
        is_run = workdir is not None and config.is_run(workdir)
        source = workdir if is_run else given if given is not None and given.is_dir() else None
        encoding = None if source is None else kept_encoding(source, experiment)
        if not is_run:
            name, kind = getattr(experiment.data, "tokenizer", None), getattr(encoding, "kind", None)
            require(name is None or kind in (None, name), "data.tokenizer", name, f"{kind!r}, as in {source}")
        with config.own_code("your plugin failed", experiment):
            try:
                return load_data(experiment.data, encoding)
            except UserError:
                if encoding is None or not is_run or options.accept_changed_data:
                    raise
                # With other symbols; `folder.check_run` then reports that the data changed.
                return load_data(experiment.data, None)

    data = on_all(read)
    with config.own_code("your plugin failed", experiment):
        experiment = data.complete(experiment)
    agree(experiment, **{"the data's fingerprint": data.fingerprint})
    return experiment, data


def _check_capacity(experiment: Experiment, strategy: Strategy, state: Any, batch: Any) -> None:
    """Refuses a run whose state, or the activations of one of its layers, exceed the memory.

    Both are lower bounds, so no run is refused that could fit. Only the memory of CPUs is checked. `state`
    are shapes before the first step; `batch` has any number of rows.
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
