"""The training loop's view of devices and processes.

Shapes: B rows of a global batch; each process reads one of several equal shards of them.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from hyena_jax.ops.forms import Layout
from hyena_jax.system.errors import UserError, require

Tree = Any


class RowShard(NamedTuple):
    """The rows of every global batch that a process reads: some of `count` equal parts, ascending."""

    parts: tuple[int, ...]
    count: int

    @property
    def times(self) -> int:
        """How many times as many rows as it reads a batch has."""
        return self.count // len(self.parts)

    def of(self, batch: Tree) -> Tree:
        """These rows of arrays [B, ...]."""
        return jax.tree.map(lambda x: np.concatenate([np.split(x, self.count)[i] for i in self.parts]), batch)


class Strategy(ABC):
    """One way to distribute a step. A "placed" tree lies on the devices as the mapped steps need it."""

    devices: tuple[jax.Device, ...]
    """The devices of all processes."""
    axis_name: str | None
    """For `make_train_step`: the axis to average over; None if means are global already."""
    sequence_axis: str | None
    """For `models.build`: the mesh axis over which sequences are sharded, or None."""
    layout: Layout
    """For `models.build`: the devices, and where activations and parameters lie on them."""
    row_shards: int
    """Number of shards of a batch's rows; the batch size must be a multiple of it."""
    row_shard: RowShard
    """The rows that this process reads."""

    def check(self, eval_step: Callable, shapes: Tree, batch: Tree) -> None:  # noqa: B027
        """Raises UserError if the batch, or the model with parameters of these shapes, cannot be sharded."""

    @abstractmethod
    def make_state(self, make: Callable[..., Tree], *placed: Tree) -> Tree:
        """The placed result of `make`, of trees that are placed."""

    @abstractmethod
    def place(self, tree: Tree) -> Tree:
        """Places a tree of host arrays, the same in all processes: parameters, or a state."""

    @abstractmethod
    def place_batch(self, batch: Tree) -> Tree:
        """Places this process's rows of a batch."""

    @abstractmethod
    def map_train_step(self, train_step: Callable, shapes: Tree) -> Callable:
        """`step(placed state, placed batch)`, which donates the state; `shapes` are those of the state."""

    @abstractmethod
    def lower_train_step(
        self, train_step: Callable, state: Tree, batch: Tree
    ) -> tuple[ClosedJaxpr, jax.stages.Lowered]:
        """The mapped step, traced, and ready to be compiled, given shapes of the state and of a global batch.

        The devices may be described only, not present.
        """

    @abstractmethod
    def map_eval_step(self, eval_step: Callable) -> Callable:
        """`step(placed parameters, placed batch)`; every process gets the values of all rows."""

    @abstractmethod
    def host_copy(self, tree: Tree) -> Tree:
        """A placed tree as whole NumPy arrays that share no memory with the devices: later steps, which
        donate theirs, cannot change them. All processes must call it."""

    def to_global(self, tree: Tree) -> Tree:
        """A placed tree as arrays over the devices of all processes, for checkpoints; shares memory."""
        return tree

    def from_global(self, tree: Tree) -> Tree:
        """The inverse of `to_global`."""
        return tree

    @abstractmethod
    def shardings(self, shapes: Tree) -> Tree:
        """The sharding of each leaf of a tree that `to_global` returns."""

    def restore_target(self, shapes: Tree) -> Tree:
        """Shapes of a placed tree -> the same shapes with the shardings of `to_global`."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.shardings(shapes),
        )


def all_devices(count: int | None, devices: Sequence[jax.Device] | None = None) -> tuple[jax.Device, ...]:
    """The first `count` of `devices` (None: all of JAX) in each process, or all; process after process."""
    among = jax.devices() if devices is None else devices
    n_local = min(Counter(device.process_index for device in among).values())
    at_most = (
        f"at most {n_local} on this machine" if devices is None else f"at most {n_local}, those of a host"
    )
    require(count is None or count <= n_local, "parallel.devices", count, at_most)
    ordered = sorted(among, key=lambda device: (device.process_index, device.id))
    chosen, taken = [], Counter()
    for device in ordered:
        if count is None or taken[device.process_index] < count:
            chosen.append(device)
            taken[device.process_index] += 1
    return tuple(chosen)


def n_processes(devices: Sequence[jax.Device]) -> int:
    """Number of processes that have some of the devices."""
    return len({device.process_index for device in devices})


def check_batch(batch_size: int, row_shards: int, accumulation_steps: int) -> None:
    """Raises UserError unless all devices get the same number of rows in every accumulated microbatch."""
    if batch_size % (row_shards * accumulation_steps):
        raise UserError(
            f"must be a multiple of the devices that shard its rows x accumulation_steps = "
            f"{row_shards} x {accumulation_steps}, got {batch_size}",
            "data.batch_size",
        )


def round_up(rows: int, row_shards: int) -> int:
    """The least multiple of `row_shards` that is at least `rows`."""
    return -(-rows // row_shards) * row_shards
