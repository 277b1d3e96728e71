"""`hyena-jax bench model`: a config's whole model, forward, with gradients, and the whole training step."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax import models
from hyena_jax.benchmark import verify
from hyena_jax.benchmark.memory import fits
from hyena_jax.benchmark.results import (
    MIB,
    Cells,
    Panel,
    Picture,
    Report,
    Results,
    curves,
    describe_device,
    memory_of,
    milliseconds,
    number,
)
from hyena_jax.benchmark.settings import Model
from hyena_jax.benchmark.timing import Measured, Program, describe, jit_program, measure
from hyena_jax.config import Experiment, ImagesConfig, TextConfig, require
from hyena_jax.data.dataset import fill_in, load
from hyena_jax.output import bar
from hyena_jax.parallel import Pmap, all_devices
from hyena_jax.parallel.strategy import check_batch
from hyena_jax.training.loss import at_positions, cross_entropy
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import init_params, init_state, make_train_step

FORWARD, GRADIENT, STEP = "forward", "loss_and_gradient", "train_step"
# Height and width, colour channels and classes of the known images.
IMAGES = {"digits": ((8, 8), 1, 10), "mnist": ((28, 28), 1, 10), "cifar10": ((32, 32), 3, 10)}

Batch = dict[str, jax.Array]


@dataclass(frozen=True)
class ModelRow:
    """The measurements of a model at one length: tokens, or patches of an image."""

    length: int
    batch: int
    units: int
    """Tokens, or images, in a batch."""
    n_params: int
    passes: dict[str, Measured]
    """By pass: `forward`, `loss_and_gradient`, `train_step`."""


class Subject(NamedTuple):
    """The model to measure, at one or several lengths."""

    experiment: Experiment
    """The config, with the fields filled in that its model takes from its data."""
    unit: str
    """The unit that is predicted and counted: `token`, `image`."""
    batches: dict[int, Callable[[], Batch]]
    """`inputs` and `targets` by length."""


def run(settings: Model, report: Report) -> None:
    """Checks the model and measures it at every length."""
    subject = make_subject(settings)
    with bar("measuring", 1 + len(subject.batches), report.console) as advance:
        if not verify.verify_model(settings.config, subject.experiment.model):
            report.notes.append(
                f"values not checked: {settings.config} has no oracle, or a part of it has none"
            )
        advance()
        for row in bench_model(subject, settings, advance, report.notes.append):
            report.add(row, cells(subject.unit, row))
            report.write()
    first = report.rows[:1]
    report.finish([f"{row['n_params']:,} parameters, batch {row['batch']}" for row in first], picture)


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
            without = f"absent with {type(data).__name__}, which is read as it is"
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


def bench_model(
    subject: Subject, settings: Model, advance: Callable[[], None], note: Callable[[str], None]
) -> Iterator[ModelRow]:
    """One row per length; the three programs take turns.

    The training step runs on all devices, as in training; the two other programs run on the first alone.
    """
    experiment = subject.experiment
    model = models.build(experiment.model)
    for length, make_batch in subject.batches.items():
        params, batch = init_params(model, experiment.seed), make_batch()
        programs = {
            **_plain_programs(model, params, batch),
            STEP: _train_step(model, params, batch, experiment),
        }
        needed = max(program.memory.total for program in programs.values() if program.memory is not None)
        if not fits(needed):
            note(f"{needed / 2**30:,.1f} GiB at length {length} are more than is available; no longer")
            return
        n_params = sum(leaf.size for leaf in jax.tree.leaves(params))
        measured = measure(programs, settings)
        yield ModelRow(length, len(batch["inputs"]), batch["targets"].size, n_params, measured)
        advance()
        if max(m.seconds.median for m in measured.values()) > settings.max_seconds:
            note(f"a run at length {length} took over {settings.max_seconds:g} s; no longer")
            return


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
    start = time.perf_counter()
    executable = step.lower(latest[0], batch).compile()
    seconds = time.perf_counter() - start

    def run() -> Any:
        latest[0], metrics = executable(latest[0], batch)
        return latest[0], metrics

    return describe(executable, seconds, run)


def cells(unit: str, row: ModelRow) -> Iterator[Cells]:
    """A line for each pass at one length."""
    for name, measured in row.passes.items():
        yield {
            "pass": name.replace("_", " "),
            "length": f"{row.length:,}",
            "ms": milliseconds(measured.seconds),
            f"{unit}s/s": f"{row.units / measured.seconds.median:,.0f}",
            "compile s": number(measured.compile_seconds, ".1f"),
            "MiB planned": number(measured.compiled_bytes, ",.1f", MIB),
            "MiB live": number(measured.live_bytes, ",.1f", MIB),
            "GFLOP by XLA": number(measured.xla_flops, ",.3g", 1e9),
        }


def picture(results: Results) -> Picture:
    """Time and memory of each pass by length."""
    passes = [(name, row["length"], each) for row in results["rows"] for name, each in row["passes"].items()]
    seconds = ((name, length, each["seconds"]["median"]) for name, length, each in passes)
    memory = ((name, length, memory_of(each)) for name, length, each in passes)
    panels = (
        Panel("time of a batch", "ms", curves(seconds, 1e-3)),
        Panel("memory", "MiB", curves(memory, MIB)),
    )
    return Picture(f"{results['settings']['config']}; {describe_device(results)}", "length", panels)
