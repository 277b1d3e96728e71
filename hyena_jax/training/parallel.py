"""How a step is mapped over devices: `jax.pmap` over a named axis. The only file that knows.

The state goes in and comes out unmapped (`in_axes=None`, `out_axes=None`): each device holds a copy, none has
a leading axis, and the old copy is given up to the new one. (With the state mapped along a leading axis, XLA
copies every leaf at every step.) Batches have a leading device axis. Knows pytrees, not models.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hyena_jax.config import UserError

AXIS = "data"

Tree = Any


def local_devices(count: int | None) -> list[jax.Device]:
    """The first `count` local devices, or all.

    Raises:
      UserError: if there are fewer.
    """
    devices = jax.local_devices()
    if count is not None and count > len(devices):
        raise UserError(f"parallel.devices must be at most {len(devices)} on this machine, got {count}")
    return devices[:count]


def check_batch(batch_size: int, n_devices: int, accumulation_steps: int) -> None:
    """Raises UserError unless every device gets the same number of rows in every accumulated part."""
    if batch_size % (n_devices * accumulation_steps):
        raise UserError(
            f"data.batch_size must be a multiple of devices x accumulation_steps = {n_devices} x "
            f"{accumulation_steps}, got {batch_size}"
        )


def replicate(tree: Tree, devices: Sequence[jax.Device]) -> Tree:
    """A copy on each device, laid out as the mapped step returns it: otherwise that compiles twice."""
    mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
    return jax.device_put(tree, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def map_train_step(train_step: Callable, devices: Sequence[jax.Device]) -> Callable:
    """`train_step(state, batch)` over all devices; the state it is given is donated.

    The step must leave the same state and metrics on every device, as one that averages its gradients does.
    """
    return jax.pmap(
        train_step, axis_name=AXIS, in_axes=(None, 0), out_axes=None, devices=devices, donate_argnums=0
    )


def map_eval_step(eval_step: Callable, devices: Sequence[jax.Device]) -> Callable:
    """`eval_step(params, batch)` over all devices."""
    return jax.pmap(eval_step, axis_name=AXIS, in_axes=(None, 0), devices=devices)


def host_copy(tree: Tree) -> Tree:
    """NumPy arrays that share no memory with the devices, so that donation cannot change them."""
    return jax.tree.map(np.array, tree)


def split_batch(batch: Tree, n_devices: int) -> Tree:
    """[B, ...] arrays as [devices, B / devices, ...]."""
    return jax.tree.map(lambda x: x.reshape(n_devices, -1, *x.shape[1:]), batch)


def round_up(rows: int, n_devices: int) -> int:
    """The least multiple of `n_devices` that is at least `rows`."""
    return -(-rows // n_devices) * n_devices
