"""The `pmap` strategy, which is the default: `jax.pmap` over a named axis.

The state is not mapped (`in_axes=None`, `out_axes=None`): each device holds a copy without a leading axis,
and the step donates the old copy to the new one. (If the state were mapped along a leading axis, XLA would
copy every leaf at every step.) Batches have a leading device axis. With several processes, each process sees
the copies on its own devices and feeds its own devices; the axis spans all devices.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hyena_jax.ops.forms import Layout
from hyena_jax.parallel.strategy import RowShard, Strategy, Tree, n_processes

AXIS = "data"


class Pmap(Strategy):
    """Every device holds the whole state and computes on its part of the rows."""

    def __init__(self, devices: Sequence[jax.Device], kernels: bool = False):
        """`devices` are those of all processes; `kernels`: see `Layout`."""
        self.devices = tuple(devices)
        self.axis_name, self.sequence_axis = AXIS, None
        self.layout = Layout(devices[0].platform, kernels=kernels)
        self.row_shards = len(devices)
        self.row_shard = RowShard((jax.process_index(),), n_processes(devices))
        ours = [device for device in devices if device.process_index == jax.process_index()]
        self._n_ours = len(ours)
        # As the mapped step returns its state; otherwise the step compiles twice.
        self._everywhere, self._here = (
            NamedSharding(Mesh(np.array(on), (AXIS,)), PartitionSpec()) for on in (devices, ours)
        )

    def make_state(self, make: Callable[..., Tree], *placed: Tree) -> Tree:
        return self.place(make(*placed))

    def place(self, tree: Tree) -> Tree:
        return jax.device_put(tree, self._here)

    def place_batch(self, batch: Tree) -> Tree:
        """[B, ...] arrays as [devices, B / devices, ...], which the mapped step then places."""
        return _split(batch, self._n_ours)

    def map_train_step(self, train_step: Callable, shapes: Tree) -> Callable:
        """See `Strategy`. `train_step` must compute the same on all devices, as by averaging gradients."""
        return jax.pmap(
            train_step,
            axis_name=AXIS,
            in_axes=(None, 0),
            out_axes=None,
            devices=self.devices,
            donate_argnums=0,
        )

    def lower_train_step(
        self, train_step: Callable, state: Tree, batch: Tree
    ) -> tuple[ClosedJaxpr, jax.stages.Lowered]:
        split = jax.eval_shape(lambda batch: _split(batch, len(self.devices)), batch)
        mapped = self.map_train_step(train_step, state)
        return jax.make_jaxpr(mapped)(state, split), mapped.lower(state, split)

    def map_eval_step(self, eval_step: Callable) -> Callable:
        """See `Strategy`. The values of the rows are [devices, B / devices]."""

        def gathered(params: Tree, batch: Tree) -> Tree:
            return jax.lax.all_gather(eval_step(params, batch), AXIS)

        return jax.pmap(gathered, axis_name=AXIS, in_axes=(None, 0), out_axes=None, devices=self.devices)

    def host_copy(self, tree: Tree) -> Tree:
        return jax.tree.map(np.array, tree)

    def to_global(self, tree: Tree) -> Tree:
        return _relabel(tree, self._everywhere)

    def from_global(self, tree: Tree) -> Tree:
        return _relabel(tree, self._here)

    def shardings(self, shapes: Tree) -> Tree:
        return jax.tree.map(lambda _: self._everywhere, shapes)


def _split(batch: Tree, n_devices: int) -> Tree:
    return jax.tree.map(lambda x: x.reshape(n_devices, -1, *x.shape[1:]), batch)


def _relabel(tree: Tree, sharding: NamedSharding) -> Tree:
    """The same copies as arrays replicated over the devices of `sharding`; shares memory."""

    def relabel(leaf: jax.Array) -> jax.Array:
        copies = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, copies)

    return jax.tree.map(relabel, tree)
