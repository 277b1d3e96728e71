"""The `sharded` strategy: jit over a mesh (data, fsdp, sequence), where XLA inserts the communication.

The rows of a batch are sharded over data and fsdp together, their length over sequence. Parameters and
optimizer state are sharded over fsdp (Rajbhandari et al. 2020, arXiv:1910.02054, stage 3): each device holds
1/fsdp of them, gathers a layer where it is used, and sums only its own shard of the gradient. `MeshLayout`
tells the model where to say so to XLA.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hyena_jax.config import ParallelConfig, UserError, require
from hyena_jax.layout import Layout
from hyena_jax.ops.fast.derivatives import own_derivative
from hyena_jax.parallel.strategy import RowShard, Strategy, Tree, n_processes

DATA, FSDP, SEQUENCE = AXES = ("data", "fsdp", "sequence")
# Leaves with fewer elements are not sharded: that would save nothing and cost a message to gather each.
SMALL = 1024


def leaf_spec(shape: Sequence[int], fsdp: int) -> PartitionSpec:
    """Shards the longest axis that fsdp divides (of equal ones the first); small leaves stay whole."""
    divisible = [axis for axis, size in enumerate(shape) if size % fsdp == 0]
    if fsdp == 1 or math.prod(shape) < SMALL or not divisible:
        return PartitionSpec()
    longest = max(divisible, key=lambda axis: shape[axis])
    return PartitionSpec(*[None] * longest, FSDP)


def batch_spec(n_dims: int) -> PartitionSpec:
    """Rows over data and fsdp; the second axis, where there is one, over sequence."""
    return PartitionSpec((DATA, FSDP), *[SEQUENCE][: n_dims - 1])


@dataclass(frozen=True)
class MeshLayout(Layout):
    """Activations stay with the rows and the length of the batch; sharded parameters are gathered where used.

    Left to itself, XLA may gather activations instead, which are many times larger, or keep gradients whole.
    """

    fsdp: int = 1
    """The size of that axis of the ambient mesh."""

    @property
    def gathers(self) -> bool:
        return self.fsdp > 1

    def pin(self, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, batch_spec(x.ndim))

    def gather(self, params: Tree) -> Tree:
        return jax.tree.map(self._gather_leaf, params)

    def _gather_leaf(self, leaf: jax.Array) -> jax.Array:
        spec = leaf_spec(leaf.shape, self.fsdp)
        if spec == PartitionSpec():
            return leaf

        def forward(leaf: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.with_sharding_constraint(leaf, PartitionSpec()), None

        def pull_back(_: None, gradient: jax.Array) -> tuple[jax.Array]:
            return (jax.lax.with_sharding_constraint(gradient, spec),)

        return own_derivative(forward, pull_back)(leaf)


class Sharded(Strategy):
    """The state is sharded over fsdp, a batch over the whole mesh."""

    def __init__(self, config: ParallelConfig, devices: Sequence[jax.Device], kernels: bool = False):
        """A process's devices are neighbours in the mesh, and sequence is its innermost axis.

        Args:
          devices: those of all processes.
          kernels: see `Layout`.

        Raises:
          UserError: if the size of the mesh is not the number of devices, or a process's devices are not
            whole rows of it.
        """
        inner = config.fsdp * config.sequence
        data = config.data or max(1, len(devices) // inner)
        sizes = f"parallel.data x fsdp x sequence = {data} x {config.fsdp} x {config.sequence}"
        if data * inner != len(devices):
            raise UserError(f"{sizes} must be the {len(devices)} devices")
        local = len(devices) // n_processes(devices)
        whole = local % config.sequence == 0 or config.sequence % local == 0
        must = f"a divisor or a multiple of the {local} devices of a process"
        require(whole, "parallel.sequence", config.sequence, must)
        self.devices = tuple(devices)
        self._mesh = Mesh(np.array(devices).reshape(data, config.fsdp, config.sequence), AXES)
        self.axis_name, self.sequence_axis = None, SEQUENCE if config.sequence > 1 else None
        self.row_shards = data * config.fsdp
        layout = devices[0].platform, self.row_shards, kernels
        self.layout = MeshLayout(*layout, config.fsdp) if len(devices) > 1 else Layout(*layout)
        # Processes whose devices shard the length of the same rows read the same rows.
        per_process = max(1, local // config.sequence)
        first = jax.process_index() * local // config.sequence
        self.row_shard = RowShard(first // per_process, self.row_shards // per_process)

    def check(self, eval_step: Callable, shapes: Tree, batch: Tree) -> None:
        n_parts = self._mesh.shape[SEQUENCE]
        if n_parts == 1:
            return
        for leaf in jax.tree.leaves(batch):
            if leaf.ndim > 1 and leaf.shape[1] % n_parts:
                of = f"a divisor of the rows' length {leaf.shape[1]}"
                raise UserError(f"must be {of}, got {n_parts}", "parallel.sequence")
        try:  # operators refuse what they cannot shard when they are traced
            with jax.set_mesh(self._mesh):
                jax.eval_shape(eval_step, shapes, batch)
        except ValueError as error:
            raise UserError(f"parallel.sequence={n_parts}: {error}") from error

    def make_state(self, make: Callable[[], Tree]) -> Tree:
        """See `Strategy`. Each device computes and holds only its own shard: the whole state need not fit on
        one device."""
        with jax.set_mesh(self._mesh):
            return jax.jit(make, out_shardings=self.shardings(jax.eval_shape(make)))()

    def place(self, tree: Tree) -> Tree:
        def place(leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
            leaf = np.asarray(leaf)
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

        return jax.tree.map(place, tree, self.shardings(tree))

    def place_batch(self, batch: Tree) -> Tree:
        def place(ours: np.ndarray) -> jax.Array:
            first = self.row_shard.index * len(ours)
            total = self.row_shard.count * len(ours)

            def shard(index: tuple[slice, ...]) -> np.ndarray:
                start, stop, _ = index[0].indices(total)
                return ours[(slice(start - first, stop - first), *index[1:])]

            sharding = self._sharding(batch_spec(ours.ndim))
            return jax.make_array_from_callback((total, *ours.shape[1:]), sharding, shard)

        return jax.tree.map(place, batch)

    def map_train_step(self, train_step: Callable, shapes: Tree) -> Callable:
        return self._within_mesh(self._jit_train_step(train_step, shapes))

    def lower_train_step(
        self, train_step: Callable, state: Tree, batch: Tree
    ) -> tuple[ClosedJaxpr, jax.stages.Lowered]:
        def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=self._sharding(batch_spec(leaf.ndim))
            )

        with jax.set_mesh(self._mesh):
            step = self._jit_train_step(train_step, state)
            traced = step.trace(self.restore_target(state), jax.tree.map(placed, batch))
            return traced.jaxpr, traced.lower()

    def map_eval_step(self, eval_step: Callable) -> Callable:
        return self._within_mesh(jax.jit(eval_step, out_shardings=self._sharding(PartitionSpec())))

    def host_copy(self, tree: Tree) -> Tree:
        """See `Strategy`. Leaf by leaf, so that no device ever holds more than one whole leaf."""
        gather = jax.jit(lambda leaf: leaf, out_shardings=self._sharding(PartitionSpec()))
        return jax.tree.map(lambda leaf: np.array(gather(leaf)), tree)

    def shardings(self, shapes: Tree) -> Tree:
        fsdp = self._mesh.shape[FSDP]
        return jax.tree.map(lambda leaf: self._sharding(leaf_spec(np.shape(leaf), fsdp)), shapes)

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self._mesh, spec)

    def _jit_train_step(self, train_step: Callable, shapes: Tree) -> Callable:
        shardings = (self.shardings(shapes), self._sharding(PartitionSpec()))
        return jax.jit(train_step, donate_argnums=0, out_shardings=shardings)

    def _within_mesh(self, step: Callable) -> Callable:
        """`step`, traced with the mesh as the ambient mesh, for mixers that call `shard_map`."""

        def mapped(*args: Tree) -> Tree:
            with jax.set_mesh(self._mesh):
                return step(*args)

        return mapped
