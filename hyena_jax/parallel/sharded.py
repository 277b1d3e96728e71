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
from jax.experimental import mesh_utils
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hyena_jax.config import ParallelConfig
from hyena_jax.ops.fast.derivatives import own_derivative
from hyena_jax.ops.forms import Layout
from hyena_jax.parallel.strategy import RowShard, Strategy, Tree, n_processes
from hyena_jax.system.errors import UserError, require

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


def arrange(config: ParallelConfig, devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices of all processes as a mesh [data, fsdp, sequence].

    On one slice, whose links are fast, they keep their order: a process's devices are neighbours. A slower
    network connects several slices of TPUs. Only `data` spans them, slice after slice; within a slice the
    devices lie as its links connect them, so that a process's devices need not be neighbours.

    UserError if they are not as many as the mesh has, fsdp x sequence is larger than a slice, data is not a
    multiple of the slices, or a process's devices are not whole rows of the mesh.
    """
    inner = config.fsdp * config.sequence
    data = config.data or max(1, len(devices) // inner)
    shape = data, config.fsdp, config.sequence
    if data * inner != len(devices):
        sizes = f"parallel.data x fsdp x sequence = {data} x {config.fsdp} x {config.sequence}"
        axes = [f"--parallel.{name} 1" for name, size in zip(AXES, shape, strict=True) if size > 1]
        how = f"; for one device give {' '.join(axes)}" if len(devices) == 1 else ""
        raise UserError(f"{sizes} must be the {len(devices)} devices{how}")
    local = len(devices) // n_processes(devices)
    whole = local % config.sequence == 0 or config.sequence % local == 0
    must = f"a divisor or a multiple of the {local} devices of a process"
    require(whole, "parallel.sequence", config.sequence, must)
    # Elsewhere than on TPUs JAX numbers hosts as slices, whatever connects them.
    slices = {getattr(each, "slice_index", 0) if each.platform == "tpu" else 0 for each in devices}
    n_slices = len(slices)
    if n_slices == 1:
        return np.array(devices).reshape(shape)
    of_slice = len(devices) // n_slices
    if inner > of_slice:
        sizes = f"parallel.fsdp x sequence = {config.fsdp} x {config.sequence}"
        raise UserError(f"{sizes} must be at most the {of_slice} devices of each of the {n_slices} slices")
    require(data % n_slices == 0, "parallel.data", data, f"a multiple of the {n_slices} slices")
    within = data // n_slices, config.fsdp, config.sequence
    try:
        arranged = mesh_utils.create_hybrid_device_mesh(
            within, (n_slices, 1, 1), devices, allow_split_physical_axes=True
        )
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"the devices of a slice cannot be arranged as {within}: {error}") from error
    sizes = {len(rows_of_process(arranged, device.process_index).parts) for device in devices}
    must = "such that every process has the same number of rows on these slices"
    require(len(sizes) == 1, "parallel.sequence", config.sequence, must)
    return arranged


def rows_of_process(mesh: np.ndarray, process: int) -> RowShard:
    """The rows of a batch that the devices of a process in a mesh [data, fsdp, sequence] hold.

    Processes whose devices shard the length of the same rows read the same rows.
    """
    by_rows = mesh.reshape(-1, mesh.shape[-1])  # as `batch_spec` shards them
    parts = [i for i, row in enumerate(by_rows) if any(d.process_index == process for d in row)]
    return RowShard(tuple(parts), len(by_rows))


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

    @property
    def random_bits(self) -> None:
        """Threefry: of a chip's own generator XLA would draw the bits of the whole batch on every device."""

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
        """`devices` are those of all processes; see `arrange` for their order. `kernels`: see `Layout`."""
        self.devices = tuple(devices)
        arranged = arrange(config, devices)
        self._mesh = Mesh(arranged, AXES)
        self.axis_name, self.sequence_axis = None, SEQUENCE if config.sequence > 1 else None
        self.row_shards = arranged.shape[0] * config.fsdp
        layout = devices[0].platform, self.row_shards, kernels
        self.layout = MeshLayout(*layout, config.fsdp) if len(devices) > 1 else Layout(*layout)
        self.row_shard = rows_of_process(arranged, jax.process_index())

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

    def make_state(self, make: Callable[..., Tree], *placed: Tree) -> Tree:
        """See `Strategy`. Each device computes and holds only its shard: the whole need not fit on one."""
        with jax.set_mesh(self._mesh):
            return jax.jit(make, out_shardings=self.shardings(jax.eval_shape(make, *placed)))(*placed)

    def place(self, tree: Tree) -> Tree:
        def place(leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
            leaf = np.asarray(leaf)
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

        return jax.tree.map(place, tree, self.shardings(tree))

    def place_batch(self, batch: Tree) -> Tree:
        def place(ours: np.ndarray) -> jax.Array:
            parts, total = self.row_shard.parts, self.row_shard.times * len(ours)
            size = len(ours) // len(parts)

            def shard(index: tuple[slice, ...]) -> np.ndarray:
                first = parts.index(index[0].indices(total)[0] // size) * size
                return ours[(slice(first, first + size), *index[1:])]

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
