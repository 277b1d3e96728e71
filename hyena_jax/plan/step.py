"""The training step of an experiment, lowered for devices that need not be there.

`python -m hyena_jax.plan.step CONFIG.json TARGET SLICES FOLDER [PLUGIN ...]` writes to FOLDER what is known
before compiling, compiles, and ends. XLA dumps the scheduled program before it makes machine code, which
takes most of the time: the process that started this one may end it then.
"""

import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from hyena_jax import config, models, parallel
from hyena_jax.config import Experiment
from hyena_jax.data.examples import examples_of
from hyena_jax.parallel.strategy import Strategy, check_batch
from hyena_jax.plan.compiling import COMPILER, FACTS, FAULT, MEMORY, PROGRAM, USER, VOCABULARY
from hyena_jax.plan.kernels import Kernel, kernels
from hyena_jax.plan.targets import compile_only_devices, parse_target
from hyena_jax.system.errors import UserError
from hyena_jax.system.machine import compiled_memory
from hyena_jax.system.trees import n_entries
from hyena_jax.training.loss import loss_function
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import init_params, init_state, make_train_step
from hyena_jax.training.timing import forward_work


class Lowered(NamedTuple):
    """The step, ready to be compiled; and facts about it that do not depend on the compiler."""

    jaxpr: ClosedJaxpr
    lowered: jax.stages.Lowered
    facts: dict[str, Any]


def lower(experiment: Experiment, devices: Sequence[jax.Device]) -> Lowered:
    """The training step of an experiment on devices, which may be compile-only ones, and must split it."""
    examples = examples_of(experiment, (), VOCABULARY)
    experiment = examples.experiment
    strategy = parallel.make_strategy(experiment.parallel, devices)
    parts = experiment.optimizer.accumulation_steps
    check_batch(experiment.data.batch_size, strategy.row_shards, parts)
    batch = jax.eval_shape(next(iter(examples.batches.values())))
    model = models.build(experiment.model, strategy.sequence_axis, strategy.layout)
    loss = loss_function(experiment.loss)
    shapes = jax.eval_shape(lambda: init_params(model, experiment.seed))
    optimizer = make_optimizer(experiment.optimizer, shapes, experiment.training.steps)
    state = jax.eval_shape(lambda: init_state(init_params(model, experiment.seed), optimizer))
    forward = forward_work(experiment.model, shapes, batch["inputs"])
    step = make_train_step(model, optimizer, experiment.seed, strategy.axis_name, parts, loss)
    try:
        traced, lowered = strategy.lower_train_step(step, state, batch)
    except ValueError as error:  # operators refuse what they cannot shard
        raise UserError(f"the step cannot be lowered for this layout: {error}") from error
    facts = {
        "unit": examples.unit,
        "units": batch["targets"].size,
        "n_params": n_entries(shapes),
        "parameters": _bytes(shapes, strategy),
        "optimizer": _bytes(state.opt_state, strategy),
        "kernels": {f"{one.name}({', '.join(one.results)})": one.work._asdict() for one in _kernels(traced)},
        "forward": {"products": forward.products, "transforms": forward.transforms},
    }
    return Lowered(traced, lowered, facts)


def n_params(experiment: Experiment) -> int:
    """The number of parameters of an experiment's model, at its own depth."""
    model = models.build(examples_of(experiment, (), VOCABULARY).experiment.model)
    return n_entries(jax.eval_shape(lambda: init_params(model, experiment.seed)))


def _kernels(traced: Any) -> list[Kernel]:
    """The step's Pallas kernels; none if one of them, a user's, cannot be counted."""
    try:
        return kernels(traced)
    except ValueError:
        return []


def _bytes(tree: Any, strategy: Strategy) -> dict[str, int]:
    """Bytes of a tree on one device, and of its leaves that are sharded, whole."""
    here = sharded = 0
    for leaf in jax.tree.leaves(strategy.restore_target(tree)):
        size = leaf.size * leaf.dtype.itemsize
        part = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        here += part
        sharded += size if part < size else 0
    return {"device": here, "sharded": sharded}


def main(config_file: str, target: str, n_slices: str, folder: str, *plugins: str) -> int:
    """Lowers and compiles; what goes wrong is written to FOLDER/fault.json."""
    out = Path(folder)

    def fail(kind: str, text: str, argument: str | None = None) -> int:
        (out / FAULT).write_text(json.dumps({"kind": kind, "text": text, "argument": argument}))
        return 1

    try:
        for name in plugins:
            config.load_plugin(name)
        experiment = config.decode(json.loads(Path(config_file).read_text()))
        _, lowered, facts = lower(experiment, compile_only_devices(parse_target(target, int(n_slices))))
        (out / FACTS).write_text(json.dumps(facts))
    except UserError as error:
        return fail(USER, error.message, error.argument)
    try:
        compiled = lowered.compile()
        (out / PROGRAM).write_text(compiled.as_text())
        (out / MEMORY).write_text(str(compiled_memory(compiled).total))
    except Exception as error:  # XLA's own kinds: no memory, no sharding, a kernel that Mosaic refuses
        return fail(COMPILER, str(error))
    return 0


if __name__ == "__main__":

    def wait() -> None:
        """Until the parent ends, which keeps the standard input open; nobody else removes the folder then."""
        os.read(sys.stdin.fileno(), 1)
        shutil.rmtree(sys.argv[4], ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    sys.exit(main(*sys.argv[1:]))
