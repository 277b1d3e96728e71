"""The `pmap` strategy, which is the default: `jax.pmap` over a named axis.

The state is not mapped (`in_axes=None`, `out_axes=None`): each device holds a copy without a leading axis,
and the step donates the old copy to the new one. (If the state were mapped along a leading axis, XLA would
copy every leaf at every step.) Batches have a leading device axis. With several processes, each process sees
the copies on its own devices and feeds its own devices; the axis spans all devices.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hyena_jax.layout import Layout
from hyena_jax.parallel.strategy import RowShard, Strategy, n_processes

AXIS = "data"

Tree = Any


def pmap_strategy(devices: tuple[jax.Device, ...]) -> Strategy:
    """The strategy of this module over `devices`."""
    ours = [device for device in devices if device.process_index == jax.process_index()]
    everywhere, here = _replicated(devices), _replicated(ours)
    return Strategy(
        devices=devices,
        axis_name=AXIS,
        sequence_axis=None,
        layout=Layout(devices[0].platform),
        row_shards=len(devices),
        row_shard=RowShard(jax.process_index(), n_processes(devices)),
        check=lambda eval_step, shapes, batch: None,
        make_state=lambda make: replicate(make(), ours),
        place=partial(replicate, devices=ours),
        place_batch=partial(split_batch, n_devices=len(ours)),
        map_train_step=lambda step, shapes: map_train_step(step, devices),
        lower_train_step=partial(_lower_train_step, devices),
        map_eval_step=partial(map_eval_step, devices=devices),
        host_copy=host_copy,
        to_global=partial(_relabel, sharding=everywhere),
        from_global=partial(_relabel, sharding=here),
        restore_target=partial(_restore_target, sharding=everywhere),
    )


def replicate(tree: Tree, devices: Sequence[jax.Device]) -> Tree:
    """A copy on each device, laid out as the mapped step returns it; otherwise the step compiles twice."""
    return jax.device_put(tree, _replicated(devices))


def map_train_step(train_step: Callable, devices: Sequence[jax.Device]) -> Callable:
    """`train_step(state, batch)` over all devices, which donates its state.

    The step must compute the same state and metrics on every device, as it does when it averages gradients.
    """
    return jax.pmap(
        train_step, axis_name=AXIS, in_axes=(None, 0), out_axes=None, devices=devices, donate_argnums=0
    )


def _lower_train_step(
    devices: Sequence[jax.Device], train_step: Callable, state: Tree, batch: Tree
) -> tuple[ClosedJaxpr, jax.stages.Lowered]:
    split = jax.eval_shape(partial(split_batch, n_devices=len(devices)), batch)
    mapped = map_train_step(train_step, devices)
    return jax.make_jaxpr(mapped)(state, split), mapped.lower(state, split)


def map_eval_step(eval_step: Callable, devices: Sequence[jax.Device]) -> Callable:
    """`eval_step(params, batch)` over all devices; every device gets all rows, [devices, B / devices]."""

    def gathered(params: Tree, batch: Tree) -> Tree:
        return jax.lax.all_gather(eval_step(params, batch), AXIS)

    return jax.pmap(gathered, axis_name=AXIS, in_axes=(None, 0), out_axes=None, devices=devices)


def host_copy(tree: Tree) -> Tree:
    """NumPy arrays that share no memory with the devices, so that donation cannot change them."""
    return jax.tree.map(np.array, tree)


def split_batch(batch: Tree, n_devices: int) -> Tree:
    """[B, ...] arrays as [devices, B / devices, ...]."""
    return jax.tree.map(lambda x: x.reshape(n_devices, -1, *x.shape[1:]), batch)


def _replicated(devices: Sequence[jax.Device]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), (AXIS,)), PartitionSpec())


def _relabel(tree: Tree, sharding: NamedSharding) -> Tree:
    """The same copies as arrays replicated over the devices of `sharding`; shares memory."""

    def relabel(leaf: jax.Array) -> jax.Array:
        copies = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, copies)

    return jax.tree.map(relabel, tree)


def _restore_target(shapes: Tree, sharding: NamedSharding) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
