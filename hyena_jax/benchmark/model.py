"""A config's model as a whole, on random data: forward, loss and gradient, and the step that trains it.

Axes: B batch, L length.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax import config, models
from hyena_jax.benchmark.memory import fits
from hyena_jax.benchmark.programs import Effort, Measured, Program, describe, jit_program, measure
from hyena_jax.benchmark.settings import Model
from hyena_jax.benchmark.timing import Compiled, time_once
from hyena_jax.benchmark.verify import example_inputs
from hyena_jax.config import Experiment, ImagesConfig, require
from hyena_jax.training import parallel
from hyena_jax.training.loss import cross_entropy
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import init_params, init_state, make_train_step

FORWARD, GRADIENT, STEP = "forward", "loss_and_gradient", "train_step"
# Height and width, colours and classes of the known images.
IMAGES = {"digits": ((8, 8), 1, 10), "mnist": ((28, 28), 1, 10), "cifar10": ((32, 32), 3, 10)}


@dataclass(frozen=True)
class ModelRow:
    """What was measured of a model at one length (or image size, in patches), by pass."""

    length: int
    batch: int
    units: int
    """Tokens, or images, in a batch."""
    n_params: int
    passes: dict[str, Measured]


def complete(settings: Model) -> Experiment:
    """The experiment of the settings, with all that it would take from its data filled in.

    Raises:
      UserError: if the config is unknown, or does not fit the settings.
    """
    experiment = config.load(settings.config)
    data = experiment.data
    if settings.batch_size is not None:
        data = replace(data, batch_size=settings.batch_size)
    if isinstance(data, ImagesConfig):
        require(not settings.seq_len, "seq_len", settings.seq_len, "absent with images")
        image_size, channels, n_classes = IMAGES[data.name]
        model = replace(experiment.model, image_size=image_size, channels=channels, n_classes=n_classes)
    else:
        vocab_size = experiment.model.vocab_size or settings.vocab_size
        model = replace(experiment.model, vocab_size=vocab_size)
        most = f"at most model.max_len={model.max_len}"
        for length in settings.seq_len:
            require(length <= model.max_len, "seq_len", length, most)
    experiment = replace(experiment, model=model, data=data)
    n_devices = len(parallel.local_devices(experiment.parallel.devices))
    parallel.check_batch(data.batch_size, n_devices, experiment.optimizer.accumulation_steps)
    return experiment


def lengths(settings: Model, experiment: Experiment) -> tuple[int, ...]:
    """Tokens of the sequences to measure, or the patches of an image."""
    if isinstance(experiment.data, ImagesConfig):
        return (experiment.model.max_len,)
    return tuple(sorted(settings.seq_len)) or (experiment.data.seq_len,)


def bench_model(
    experiment: Experiment,
    lengths: Sequence[int],
    effort: Effort,
    advance: Callable[[], None],
    note: Callable[[str], None],
) -> Iterator[ModelRow]:
    """One row a length; the three programs take turns.

    The step is mapped over the devices as training maps it; the two others run on the first alone.
    """
    model, batch = models.build(experiment.model), experiment.data.batch_size
    is_text = not isinstance(experiment.data, ImagesConfig)
    for length in lengths:
        params = init_params(model, experiment.seed)
        inputs = example_inputs(experiment.model, batch, length)
        targets = inputs if is_text else jnp.zeros(batch, jnp.int32)
        programs = {
            **_plain_programs(model, params, inputs, targets),
            STEP: _train_step(model, params, {"inputs": inputs, "targets": targets}, experiment),
        }
        needed = max(program.memory.total for program in programs.values() if program.memory is not None)
        if not fits(needed):
            note(f"{needed / 2**30:,.1f} GiB at length {length} are more than is available; no longer")
            return
        n_params = sum(leaf.size for leaf in jax.tree.leaves(params))
        units = batch * length if is_text else batch
        measured = measure(programs, effort)
        yield ModelRow(length, batch, units, n_params, measured)
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
        return model.apply({"params": params}, inputs)

    return {
        FORWARD: jit_program(forward, params, inputs),
        GRADIENT: jit_program(jax.value_and_grad(loss), params, inputs, targets),
    }


def _train_step(model: nn.Module, params: dict, batch: dict, experiment: Experiment) -> Program:
    """The step as the loop of training maps and donates it; each run goes on from the state before."""
    devices = parallel.local_devices(experiment.parallel.devices)
    optimizer = make_optimizer(experiment.optimizer, params, experiment.training.steps)
    parts = experiment.optimizer.accumulation_steps
    step = parallel.map_train_step(
        make_train_step(model, optimizer, experiment.seed, parallel.AXIS, parts), devices
    )
    # A copy: the state is donated, and the parameters are still needed by the other programs.
    state = parallel.replicate(parallel.host_copy(init_state(params, optimizer)), devices)
    batch = parallel.split_batch(batch, len(devices))
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
