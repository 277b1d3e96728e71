"""What the loop knows of how a step is spread over devices and processes. Knows pytrees, not models.

Shapes: B rows of a global batch; each process reads an equal part of them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hyena_jax.config import require

Tree = Any


class Rows(NamedTuple):
    """The part of every global batch that a process reads: number `index` of `count` equal ones."""

    index: int
    count: int

    def of(self, batch: Tree) -> Tree:
        """This part of arrays [B, ...]."""
        return jax.tree.map(lambda x: np.split(x, self.count)[self.index], batch)


class Strategy(NamedTuple):
    """One way to spread a step. A "placed" tree lies on the devices as the mapped steps want it."""

    devices: tuple[jax.Device, ...]
    """All devices, of all processes."""
    axis_name: str | None
    """For `make_train_step`: the axis to average over, None where means are global already."""
    sequence_axis: str | None
    """For `models.build`: the mesh axis that shares out a language model's sequences; None: none does."""
    row_shards: int
    """Parts that the rows of a batch are cut into; a batch must be a multiple of it."""
    rows: Rows
    """What this process reads of a batch."""
    check: Callable[[Callable, Tree, Tree], None]
    """(`eval_step`, shapes of parameters, a batch): raises UserError if that batch, or what the model makes
    of it, cannot be cut."""
    make_state: Callable[[Callable[[], Tree]], Tree]
    """The placed result of a function without arguments."""
    place: Callable[[Tree], Tree]
    """Places a tree of host arrays, the same in all processes: parameters, or a state."""
    place_batch: Callable[[Tree], Tree]
    """Places this process' rows of a batch."""
    map_train_step: Callable[[Callable, Tree], Callable]
    """(`train_step`, shapes of the state) -> `step(placed state, placed batch)`, which donates the state."""
    map_eval_step: Callable[[Callable], Callable]
    """`eval_step` -> `step(placed parameters, placed batch)`; every process gets the sums of all rows."""
    host_copy: Callable[[Tree], Tree]
    """Whole NumPy arrays of a placed tree, which later steps cannot change. All processes must call it."""
    to_global: Callable[[Tree], Tree]
    """A placed tree as arrays over all devices of all processes, as checkpoints hold it; shares memory."""
    from_global: Callable[[Tree], Tree]
    """The inverse of `to_global`."""
    restore_target: Callable[[Tree], Tree]
    """Shapes of a placed tree -> the same with the shardings of `to_global`."""


def all_devices(count: int | None) -> tuple[jax.Device, ...]:
    """The first `count` devices of each process, or all; process after process.

    Raises:
      UserError: if a process has fewer.
    """
    n_local = len(jax.local_devices())
    require(
        count is None or count <= n_local, "parallel.devices", count, f"at most {n_local} on this machine"
    )
    ordered = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    chosen, taken = [], Counter()
    for device in ordered:
        if count is None or taken[device.process_index] < count:
            chosen.append(device)
            taken[device.process_index] += 1
    return tuple(chosen)


def bytes_on_one_device(trees: Sequence[Tree]) -> int:
    """Bytes that the first local device holds of placed trees."""
    shards = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(trees)]
    return sum(shard.nbytes for shard in shards)
