"""How a step is mapped over devices: `jax.pmap` over a named axis. The only file that knows.

Arrays of the mapped world have a leading device axis. Knows pytrees, not models.
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
    """A copy of `tree` on each device, laid out as pmap's own outputs are, so that it can be donated."""
    copy = jax.pmap(lambda tree, _: tree, axis_name=AXIS, in_axes=(None, 0), devices=devices)
    return copy(tree, np.arange(len(devices)))


def first_replica(tree: Tree) -> Tree:
    """The first device's copy, as NumPy arrays that share no memory with the device."""
    return jax.tree.map(lambda x: np.array(x.addressable_data(0))[0], tree)


def map_train_step(train_step: Callable, devices: Sequence[jax.Device]) -> Callable:
    """The train step over all devices; the old state's buffers are given up to the new one."""
    return jax.pmap(train_step, axis_name=AXIS, devices=devices, donate_argnums=0)


def map_eval_step(eval_step: Callable, devices: Sequence[jax.Device]) -> Callable:
    """The evaluation step over all devices."""
    return jax.pmap(eval_step, axis_name=AXIS, devices=devices)


def split_batch(batch: Tree, n_devices: int) -> Tree:
    """[B, ...] arrays as [devices, B / devices, ...]."""
    return jax.tree.map(lambda x: x.reshape(n_devices, -1, *x.shape[1:]), batch)


def round_up(rows: int, n_devices: int) -> int:
    """The least multiple of `n_devices` that is at least `rows`."""
    return -(-rows // n_devices) * n_devices
