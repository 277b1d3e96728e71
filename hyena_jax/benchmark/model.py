"""`hyena-jax bench model`: a config's whole model, forward, with gradients, and the whole training step."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax import models
from hyena_jax.benchmark import verify
from hyena_jax.benchmark.results import Cells, Picture, Results, describe_device, milliseconds, number, panels
from hyena_jax.benchmark.runner import Benchmark, Case, Measurement, Size, cost_cells
from hyena_jax.benchmark.settings import Model
from hyena_jax.benchmark.timing import Program, compiled, jit_program
from hyena_jax.config import Experiment, ImagesConfig, TextConfig, name_of
from hyena_jax.data.dataset import fill_in, load
from hyena_jax.parallel import Pmap, all_devices
from hyena_jax.parallel.strategy import check_batch
from hyena_jax.system.errors import require
from hyena_jax.training.loss import at_positions, cross_entropy
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import init_params, init_state, make_train_step

FORWARD, GRADIENT, STEP = "forward", "loss_and_gradient", "train_step"
# Height and width, colour channels and classes of the known images.
IMAGES = {"digits": ((8, 8), 1, 10), "mnist": ((28, 28), 1, 10), "cifar10": ((32, 32), 3, 10)}

Batch = dict[str, jax.Array]


class Subject(NamedTuple):
    """The model to measure, at one or several lengths."""

    experiment: Experiment
    """The config, with the fields filled in that its model takes from its data."""
    unit: str
    """The unit that is predicted and counted: `token`, `image`."""
    batches: dict[int, Callable[[], Batch]]
    """`inputs` and `targets` by length."""


def make(settings: Model) -> Benchmark:
    """The model at every length: tokens, or patches of an image."""
    subject = make_subject(settings)
    return Benchmark(
        methods=[settings.config],
        sizes=[{"length": length} for length in subject.batches],
        check=lambda name: verify.verify_model(name, subject.experiment.model),
        build=lambda _, size: build(subject, size),
        cells=partial(cells, subject.unit),
        picture=picture,
        lines=lambda results: [
            f"{row['n_params']:,} parameters, batch {row['batch']}" for row in results["rows"][:1]
        ],
    )


def make_subject(settings: Model) -> Subject:
    """The model of the settings' config; see `subject_of`.

    Raises:
      UserError: if the config does not fit the settings, or its data cannot be read.
    """
    experiment, data = settings.experiment, settings.experiment.data
    if settings.batch_size is not None:
        data = replace(data, batch_size=settings.batch_size)
    experiment = replace(experiment, data=data)
    n_devices = len(all_devices(experiment.parallel.devices))
    check_batch(data.batch_size, n_devices, experiment.optimizer.accumulation_steps)
    return subject_of(experiment, settings.seq_len, settings.vocab_size)


def subject_of(experiment: Experiment, seq_len: tuple[int, ...], vocab_size: int) -> Subject:
    """The model of an experiment, with random text or images; other data is read.

    A folder of images is read only for sizes that the model lacks.

    Args:
      seq_len: lengths of text; empty: the experiment's.
      vocab_size: of a model that takes its vocabulary from its text.

    Raises:
      UserError: if a length is not possible, or the data cannot be read.
    """
    rank = getattr(getattr(experiment.model, "lora", None), "rank", None)
    require(rank is None, "model.lora.rank", rank, "None: the step that trains all parameters is measured")
    data = experiment.data
    match data:
        case TextConfig():
            return _text(experiment, seq_len, vocab_size)
        case ImagesConfig():
            without = f"absent with {data.inputs}"
            names, model = ("image_size", "channels", "n_classes"), experiment.model
            if data.path is None:
                experiment = fill_in(experiment, dict(zip(names, IMAGES[data.name], strict=True)))
            elif None in [getattr(model, name, 0) for name in names]:
                experiment = load(data).complete(experiment)
            model = experiment.model

            def pixels() -> Batch:
                """Random pixels, all of one class."""
                inputs = verify.example_inputs(model, data.batch_size, model.max_len)
                return {"inputs": inputs, "targets": jnp.zeros(data.batch_size, jnp.int32)}

            batches = {model.max_len: pixels}
            found = Subject(experiment, "image", batches)
        case _:
            without = f"absent with {name_of(data)}, which is read as it is"
            dataset = load(data)
            experiment = dataset.complete(experiment)
            batch = dict(dataset.train_batches(data.batch_size, experiment.seed)[0])
            shape = batch["inputs"].shape
            length = getattr(experiment.model, "max_len", shape[1] if len(shape) > 1 else 1)
            found = Subject(experiment, dataset.unit, {length: lambda: batch})
    require(not seq_len, "seq_len", seq_len, without)
    return found


def _text(experiment: Experiment, seq_len: tuple[int, ...], vocab_size: int) -> Subject:
    """Random tokens; a model that takes its vocabulary from its text gets `vocab_size`."""
    model, batch_size = experiment.model, experiment.data.batch_size
    if getattr(model, "vocab_size", 0) is None:
        model = replace(model, vocab_size=vocab_size)
    longest = model.input_row()[0][0]
    for length in seq_len:
        require(length <= longest, "seq_len", length, f"at most model.max_len={longest}")

    def batch(length: int) -> Batch:
        tokens = verify.example_inputs(model, batch_size, length)
        return {"inputs": tokens, "targets": tokens}

    lengths = tuple(sorted(seq_len)) or (experiment.data.seq_len,)
    batches = {length: partial(batch, length) for length in lengths}
    return Subject(replace(experiment, model=model), "token", batches)


def build(subject: Subject, size: Size) -> Case:
    """Compiles the three programs.

    The training step runs on all devices, as in training; the two other programs run on the first alone.
    """
    experiment = subject.experiment
    model = models.build(experiment.model)
    params, batch = init_params(model, experiment.seed), subject.batches[size["length"]]()
    step = _train_step(model, params, batch, experiment)
    n_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    # Units: tokens, or images.
    facts = {"batch": len(batch["inputs"]), "units": batch["targets"].size, "n_params": n_params}
    return Case({**_plain_programs(model, params, batch), STEP: step}, facts)


def _plain_programs(model: nn.Module, params: dict, batch: Batch) -> dict:
    """Logits without dropout; mean loss with dropout, and its gradient."""
    scored = {name: x for name, x in batch.items() if name != "weights"}

    def loss(params: dict, batch: Batch) -> jax.Array:
        rngs = {"dropout": jax.random.key(0)}
        logits = model.apply({"params": params}, batch["inputs"], None, False, rngs=rngs)
        return cross_entropy(at_positions(logits, batch), batch["targets"]).mean()

    def forward(params: dict, inputs: jax.Array) -> jax.Array:
        return model.apply({"params": params}, inputs, None, True)

    return {
        FORWARD: jit_program(forward, params, batch["inputs"]),
        GRADIENT: jit_program(jax.value_and_grad(loss), params, scored),
    }


def _train_step(model: nn.Module, params: dict, batch: dict, experiment: Experiment) -> Program:
    """The step as the training loop maps and donates it; each run continues from the previous run's state."""
    strategy = Pmap(all_devices(experiment.parallel.devices))
    optimizer = make_optimizer(experiment.optimizer, params, experiment.training.steps)
    parts = experiment.optimizer.accumulation_steps
    step = make_train_step(model, optimizer, experiment.seed, strategy.axis_name, parts)
    state = init_state(params, optimizer)
    step = strategy.map_train_step(step, state)
    # A copy: the state is donated, and the other programs still need the parameters.
    latest = [strategy.place(strategy.host_copy(state))]
    batch = strategy.place_batch(batch)
    program = compiled(step, latest[0], batch)

    def run() -> Any:
        latest[0], metrics = program.run(latest[0], batch)
        return latest[0], metrics

    return program._replace(run=run)


def cells(unit: str, row: Measurement) -> Iterator[Cells]:
    """A line for each pass at one length."""
    for name, measured in row.passes.items():
        yield {
            "pass": name.replace("_", " "),
            "length": f"{row.size['length']:,}",
            "ms": milliseconds(measured.seconds),
            f"{unit}s/s": f"{row.facts['units'] / measured.seconds.median:,.0f}",
            **cost_cells(measured),
            "GFLOP by XLA": number(measured.xla_flops, ",.3g", 1e9),
        }


def picture(results: Results) -> Picture:
    """Time and memory of each pass by length."""
    points = [(name, row["length"], each) for row in results["rows"] for name, each in row["passes"].items()]
    return Picture(f"{results['settings']['config']}; {describe_device(results)}", "length", panels(points))
