"""A config's model as a whole: forward, loss and gradient, and the step that trains it.

Axes: B batch, L length.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax import config, models
from hyena_jax.benchmark.memory import fits
from hyena_jax.benchmark.programs import Effort, Measured, Program, describe, jit_program, measure
from hyena_jax.benchmark.settings import Model
from hyena_jax.benchmark.timing import Compiled, time_once
from hyena_jax.benchmark.verify import example_inputs
from hyena_jax.config import Experiment, ImagesConfig, ModelConfig, TextConfig, require
from hyena_jax.data.dataset import load
from hyena_jax.parallel import pmap
from hyena_jax.parallel.strategy import check_batch, local_devices
from hyena_jax.training.loss import cross_entropy
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import init_params, init_state, make_train_step

FORWARD, GRADIENT, STEP = "forward", "loss_and_gradient", "train_step"
# Height and width, colours and classes of the known images.
IMAGES = {"digits": ((8, 8), 1, 10), "mnist": ((28, 28), 1, 10), "cifar10": ((32, 32), 3, 10)}


Batch = dict[str, jax.Array]


@dataclass(frozen=True)
class ModelRow:
    """What was measured of a model at one length (or image size, in patches), by pass."""

    length: int
    batch: int
    units: int
    """Tokens, or images, in a batch."""
    n_params: int
    passes: dict[str, Measured]


class Subject(NamedTuple):
    """What is measured: a config's model, at one or several lengths."""

    experiment: Experiment
    """With all that its model takes from its data."""
    unit: str
    """What is predicted and counted: `token`, `image`."""
    batches: dict[int, Callable[[], Batch]]
    """`inputs` and `targets` by length."""


def subject(settings: Model) -> Subject:
    """The model of the settings' config, with random text or images; other data are read.

    Raises:
      UserError: if the config is unknown or does not fit the settings, or its data cannot be read.
    """
    experiment = config.load(settings.config)
    data = experiment.data
    if settings.batch_size is not None:
        data = replace(data, batch_size=settings.batch_size)
    experiment = replace(experiment, data=data)
    n_devices = len(local_devices(experiment.parallel.devices))
    check_batch(data.batch_size, n_devices, experiment.optimizer.accumulation_steps)
    match data:
        case TextConfig():
            return _text(experiment, settings)
        case ImagesConfig():
            without = f"absent with {data.inputs}"
            image_size, channels, n_classes = IMAGES[data.name]
            sizes = {"image_size": image_size, "channels": channels, "n_classes": n_classes}
            model = replace(experiment.model, **sizes)
            batches = {model.max_len: partial(_images, model, data.batch_size)}
            found = Subject(replace(experiment, model=model), "image", batches)
        case _:
            without = f"absent with {type(data).__name__}, which is read as it is"
            found = _read(experiment)
    require(not settings.seq_len, "seq_len", settings.seq_len, without)
    return found


def _text(experiment: Experiment, settings: Model) -> Subject:
    """Random tokens, with the settings' number of symbols where the model leaves it to its text."""
    model, batch_size = experiment.model, experiment.data.batch_size
    if getattr(model, "vocab_size", 0) is None:
        model = replace(model, vocab_size=settings.vocab_size)
    longest = model.input_row()[0][0]
    for length in settings.seq_len:
        require(length <= longest, "seq_len", length, f"at most model.max_len={longest}")

    def batch(length: int) -> Batch:
        tokens = example_inputs(model, batch_size, length)
        return {"inputs": tokens, "targets": tokens}

    lengths = tuple(sorted(settings.seq_len)) or (experiment.data.seq_len,)
    batches = {length: partial(batch, length) for length in lengths}
    return Subject(replace(experiment, model=model), "token", batches)


def _images(model: ModelConfig, batch_size: int) -> Batch:
    """Random pixels of one class."""
    inputs = example_inputs(model, batch_size, model.max_len)
    return {"inputs": inputs, "targets": jnp.zeros(batch_size, jnp.int32)}


def _read(experiment: Experiment) -> Subject:
    """The first batch of the data."""
    data = load(experiment.data)
    experiment = data.complete(experiment)
    batch = dict(data.train_batches(experiment.data.batch_size, experiment.seed)[0])
    shape = batch["inputs"].shape
    length = getattr(experiment.model, "max_len", shape[1] if len(shape) > 1 else 1)
    return Subject(experiment, data.unit, {length: lambda: batch})


def bench_model(
    subject: Subject, effort: Effort, advance: Callable[[], None], note: Callable[[str], None]
) -> Iterator[ModelRow]:
    """One row a length; the three programs take turns.

    The step is mapped over the devices as training maps it; the two others run on the first alone.
    """
    experiment = subject.experiment
    model = models.build(experiment.model)
    for length, make_batch in subject.batches.items():
        params, batch = init_params(model, experiment.seed), make_batch()
        programs = {
            **_plain_programs(model, params, batch["inputs"], batch["targets"]),
            STEP: _train_step(model, params, batch, experiment),
        }
        needed = max(program.memory.total for program in programs.values() if program.memory is not None)
        if not fits(needed):
            note(f"{needed / 2**30:,.1f} GiB at length {length} are more than is available; no longer")
            return
        n_params = sum(leaf.size for leaf in jax.tree.leaves(params))
        measured = measure(programs, effort)
        yield ModelRow(length, len(batch["inputs"]), batch["targets"].size, n_params, measured)
        advance()
        if max(m.seconds.median for m in measured.values()) > effort.max_seconds:
            note(f"a run at length {length} took over {effort.max_seconds:g} s; no longer")
            return


def _plain_programs(model: nn.Module, params: dict, inputs: jax.Array, targets: jax.Array) -> dict:
    """Logits without dropout; mean loss with dropout, and its gradient."""

    def loss(params: dict, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, inputs, None, False, rngs={"dropout": jax.random.key(0)})
        return cross_entropy(logits, targets).mean()

    def forward(params: dict, inputs: jax.Array) -> jax.Array:
        return model.apply({"params": params}, inputs, None, True)

    return {
        FORWARD: jit_program(forward, params, inputs),
        GRADIENT: jit_program(jax.value_and_grad(loss), params, inputs, targets),
    }


def _train_step(model: nn.Module, params: dict, batch: dict, experiment: Experiment) -> Program:
    """The step as the loop of training maps and donates it; each run goes on from the state before."""
    devices = local_devices(experiment.parallel.devices)
    optimizer = make_optimizer(experiment.optimizer, params, experiment.training.steps)
    parts = experiment.optimizer.accumulation_steps
    step = pmap.map_train_step(make_train_step(model, optimizer, experiment.seed, pmap.AXIS, parts), devices)
    # A copy: the state is donated, and the parameters are still needed by the other programs.
    state = pmap.replicate(pmap.host_copy(init_state(params, optimizer)), devices)
    batch = pmap.split_batch(batch, len(devices))
    compiled = _compile(step, state, batch)
    latest = [state]

    def run() -> Any:
        latest[0], metrics = compiled.executable(latest[0], batch)
        return latest[0], metrics

    return describe(compiled.executable, compiled.seconds, run)


def _compile(step: Callable, *args: Any) -> Compiled:
    found = []
    seconds = time_once(lambda: found.append(step.lower(*args).compile()))
    return Compiled(found[0], seconds)
