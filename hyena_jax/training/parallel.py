"""How a step is spread over devices: which strategy, and the default one, `jax.pmap` over a named axis.

The state goes in and comes out unmapped (`in_axes=None`, `out_axes=None`): each device holds a copy, none has
a leading axis, and the old copy is given up to the new one. (With the state mapped along a leading axis, XLA
copies every leaf at every step.) Batches have a leading device axis. Of several processes each sees its own
devices' copies and feeds its own devices; the axis spans all. Knows pytrees, not models.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hyena_jax.config import ParallelConfig, UserError
from hyena_jax.training.sharded import sharded_strategy
from hyena_jax.training.strategy import Rows, Strategy, all_devices

AXIS = "data"

Tree = Any


def make_strategy(config: ParallelConfig) -> Strategy:
    """The strategy that `config` names, over its devices.

    Raises:
      UserError: if the devices do not suffice, or do not fit the mesh.
    """
    return sharded_strategy(config) if config.strategy == "sharded" else pmap_strategy(config)


def pmap_strategy(config: ParallelConfig) -> Strategy:
    """See the module."""
    devices = all_devices(config.devices)
    ours = [device for device in devices if device.process_index == jax.process_index()]
    everywhere, here = _replicated(devices), _replicated(ours)
    return Strategy(
        devices=devices,
        axis_name=AXIS,
        sequence_axis=None,
        row_shards=len(devices),
        rows=Rows(jax.process_index(), jax.process_count()),
        check=lambda eval_step, shapes, batch: None,
        make_state=lambda make: replicate(make(), ours),
        place=partial(replicate, devices=ours),
        place_batch=partial(split_batch, n_devices=len(ours)),
        map_train_step=lambda step, shapes: map_train_step(step, devices),
        map_eval_step=partial(map_eval_step, devices=devices),
        host_copy=host_copy,
        to_global=partial(_relabel, sharding=everywhere),
        from_global=partial(_relabel, sharding=here),
        restore_target=partial(_restore_target, sharding=everywhere),
    )


def local_devices(count: int | None) -> list[jax.Device]:
    """The first `count` devices of this process, or all.

    Raises:
      UserError: if there are fewer.
    """
    return [device for device in all_devices(count) if device.process_index == jax.process_index()]


def check_batch(batch_size: int, row_shards: int, accumulation_steps: int) -> None:
    """Raises UserError unless all devices get the same number of rows in every accumulated part."""
    if batch_size % (row_shards * accumulation_steps):
        raise UserError(
            f"data.batch_size must be a multiple of devices that divide its rows x accumulation_steps = "
            f"{row_shards} x {accumulation_steps}, got {batch_size}"
        )


def replicate(tree: Tree, devices: Sequence[jax.Device]) -> Tree:
    """A copy on each device, laid out as the mapped step returns it: otherwise that compiles twice."""
    return jax.device_put(tree, _replicated(devices))


def map_train_step(train_step: Callable, devices: Sequence[jax.Device]) -> Callable:
    """`train_step(state, batch)` over all devices; the state it is given is donated.

    The step must leave the same state and metrics on every device, as one that averages its gradients does.
    """
    return jax.pmap(
        train_step, axis_name=AXIS, in_axes=(None, 0), out_axes=None, devices=devices, donate_argnums=0
    )


def map_eval_step(eval_step: Callable, devices: Sequence[jax.Device]) -> Callable:
    """`eval_step(params, batch)` over all devices; each gets the rows of all, [devices, B / devices]."""

    def gathered(params: Tree, batch: Tree) -> Tree:
        return jax.lax.all_gather(eval_step(params, batch), AXIS)

    return jax.pmap(gathered, axis_name=AXIS, in_axes=(None, 0), out_axes=None, devices=devices)


def host_copy(tree: Tree) -> Tree:
    """NumPy arrays that share no memory with the devices, so that donation cannot change them."""
    return jax.tree.map(np.array, tree)


def split_batch(batch: Tree, n_devices: int) -> Tree:
    """[B, ...] arrays as [devices, B / devices, ...]."""
    return jax.tree.map(lambda x: x.reshape(n_devices, -1, *x.shape[1:]), batch)


def round_up(rows: int, row_shards: int) -> int:
    """The least multiple of `row_shards` that is at least `rows`."""
    return -(-rows // row_shards) * row_shards


def _replicated(devices: Sequence[jax.Device]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), (AXIS,)), PartitionSpec())


def _relabel(tree: Tree, sharding: NamedSharding) -> Tree:
    """The copies on this process' devices, as arrays replicated over the devices of `sharding`."""

    def relabel(leaf: jax.Array) -> jax.Array:
        copies = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, copies)

    return jax.tree.map(relabel, tree)


def _restore_target(shapes: Tree, sharding: NamedSharding) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
