"""Refuses a run that cannot fit the machine's memory, before anything is allocated."""

import math
from typing import Any

import jax

from hyena_jax.config import Experiment, memory_size, require
from hyena_jax.parallel.strategy import Strategy

Tree = Any
GIB = 2**30


def check_capacity(experiment: Experiment, strategy: Strategy, state: Tree, batch: Tree) -> None:
    """Refuses a run whose state, or whose activations of one layer, exceed the memory.

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
