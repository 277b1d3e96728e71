"""The `sharded` strategy: jit over a mesh (data, fsdp, sequence), where XLA inserts the communication.

The rows of a batch are sharded over data and fsdp together, their length over sequence. Parameters and
optimizer state are sharded over fsdp (Rajbhandari et al. 2020, arXiv:1910.02054, stage 3): each device holds
1/fsdp of them, gathers a layer where it is used, and sums only its own shard of the gradient. `make_layout`
tells the model where to say so to XLA.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hyena_jax.config import ParallelConfig, UserError, require
from hyena_jax.layout import Layout
from hyena_jax.ops.fast.derivatives import own_derivative
from hyena_jax.parallel.strategy import RowShard, Strategy, n_processes

DATA, FSDP, SEQUENCE = AXES = ("data", "fsdp", "sequence")
# Leaves with fewer elements are not sharded: that would save nothing and cost a message to gather each.
SMALL = 1024

Tree = Any


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


def make_mesh(config: ParallelConfig, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of `config` over `devices`: a process's devices are neighbours, sequence is innermost.

    Raises:
      UserError: if its size is not the number of devices, or a process's devices are not whole rows of it.
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
    return Mesh(np.array(devices).reshape(data, config.fsdp, config.sequence), AXES)


def mesh_strategy(config: ParallelConfig, devices: Sequence[jax.Device]) -> Strategy:
    """The strategy of this module over `devices`; UserError if they do not fit the mesh of `config`."""
    mesh = make_mesh(config, devices)
    row_shard = _row_shard(mesh)
    return Strategy(
        devices=tuple(mesh.devices.flat),
        axis_name=None,
        sequence_axis=SEQUENCE if config.sequence > 1 else None,
        layout=make_layout(mesh),
        row_shards=mesh.shape[DATA] * mesh.shape[FSDP],
        row_shard=row_shard,
        check=partial(_check, mesh),
        make_state=partial(_make_state, mesh),
        place=lambda tree: jax.tree.map(_place_leaf, tree, _shardings(mesh, tree)),
        place_batch=partial(_place_batch, mesh, row_shard),
        map_train_step=partial(_map_train_step, mesh),
        lower_train_step=partial(_lower_train_step, mesh),
        map_eval_step=partial(_map_eval_step, mesh),
        host_copy=partial(_host_copy, mesh),
        to_global=lambda tree: tree,
        from_global=lambda tree: tree,
        restore_target=partial(_restore_target, mesh),
    )


def make_layout(mesh: Mesh) -> Layout:
    """Activations stay with the rows and the length of the batch; sharded parameters are gathered where used.

    Left to itself, XLA may gather activations instead, which are many times larger, or keep gradients whole.
    """
    layout = Layout(mesh.devices.flat[0].platform, mesh.shape[DATA] * mesh.shape[FSDP])
    if mesh.size > 1:
        layout = layout._replace(pin=_pin)
    if mesh.shape[FSDP] > 1:
        layout = layout._replace(gather=partial(_gather, mesh.shape[FSDP]))
    return layout


def _pin(x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, batch_spec(x.ndim))


def _gather(fsdp: int, params: Tree) -> Tree:
    def gather(leaf: jax.Array) -> jax.Array:
        spec = leaf_spec(leaf.shape, fsdp)
        if spec == PartitionSpec():
            return leaf

        def forward(leaf: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.with_sharding_constraint(leaf, PartitionSpec()), None

        def pull_back(_: None, gradient: jax.Array) -> tuple[jax.Array]:
            return (jax.lax.with_sharding_constraint(gradient, spec),)

        return own_derivative(forward, pull_back)(leaf)

    return jax.tree.map(gather, params)


def _row_shard(mesh: Mesh) -> RowShard:
    """This process's rows; processes whose devices shard the length of the same rows read the same rows."""
    local = mesh.devices.size // n_processes(mesh.devices.flat)
    first = jax.process_index() * local // mesh.shape[SEQUENCE]
    per_process = max(1, local // mesh.shape[SEQUENCE])
    return RowShard(first // per_process, mesh.shape[DATA] * mesh.shape[FSDP] // per_process)


def _shardings(mesh: Mesh, shapes: Tree) -> Tree:
    fsdp = mesh.shape[FSDP]
    return jax.tree.map(lambda leaf: NamedSharding(mesh, leaf_spec(np.shape(leaf), fsdp)), shapes)


def _check(mesh: Mesh, eval_step: Callable, shapes: Tree, batch: Tree) -> None:
    n_parts = mesh.shape[SEQUENCE]
    if n_parts == 1:
        return
    for leaf in jax.tree.leaves(batch):
        if leaf.ndim > 1 and leaf.shape[1] % n_parts:
            of = f"a divisor of the rows' length {leaf.shape[1]}"
            raise UserError(f"parallel.sequence must be {of}, got {n_parts}")
    try:  # operators refuse what they cannot shard when they are traced
        with jax.set_mesh(mesh):
            jax.eval_shape(eval_step, shapes, batch)
    except ValueError as error:
        raise UserError(f"parallel.sequence={n_parts}: {error}") from error


def _make_state(mesh: Mesh, make: Callable[[], Tree]) -> Tree:
    """Each device computes and holds only its own shard: the whole state need not fit on one device."""
    with jax.set_mesh(mesh):
        return jax.jit(make, out_shardings=_shardings(mesh, jax.eval_shape(make)))()


def _place_leaf(leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
    leaf = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])


def _place_batch(mesh: Mesh, row_shard: RowShard, batch: Tree) -> Tree:
    def place(ours: np.ndarray) -> jax.Array:
        first = row_shard.index * len(ours)
        total = row_shard.count * len(ours)

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(total)
            return ours[(slice(start - first, stop - first), *index[1:])]

        sharding = NamedSharding(mesh, batch_spec(ours.ndim))
        return jax.make_array_from_callback((total, *ours.shape[1:]), sharding, shard)

    return jax.tree.map(place, batch)


def _map_train_step(mesh: Mesh, train_step: Callable, shapes: Tree) -> Callable:
    return _within(mesh, _jit_train_step(mesh, train_step, shapes))


def _jit_train_step(mesh: Mesh, train_step: Callable, shapes: Tree) -> Callable:
    shardings = (_shardings(mesh, shapes), NamedSharding(mesh, PartitionSpec()))
    return jax.jit(train_step, donate_argnums=0, out_shardings=shardings)


def _lower_train_step(
    mesh: Mesh, train_step: Callable, state: Tree, batch: Tree
) -> tuple[ClosedJaxpr, jax.stages.Lowered]:
    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, batch_spec(leaf.ndim))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    with jax.set_mesh(mesh):
        step = _jit_train_step(mesh, train_step, state)
        traced = step.trace(_restore_target(mesh, state), jax.tree.map(placed, batch))
        return traced.jaxpr, traced.lower()


def _map_eval_step(mesh: Mesh, eval_step: Callable) -> Callable:
    return _within(mesh, jax.jit(eval_step, out_shardings=NamedSharding(mesh, PartitionSpec())))


def _within(mesh: Mesh, step: Callable) -> Callable:
    """`step`, traced with `mesh` as the ambient mesh, for mixers that call `shard_map`."""

    def mapped(*args: Tree) -> Tree:
        with jax.set_mesh(mesh):
            return step(*args)

    return mapped


def _host_copy(mesh: Mesh, tree: Tree) -> Tree:
    """Leaf by leaf, so that no device ever holds more than one whole leaf."""
    gather = jax.jit(lambda leaf: leaf, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return jax.tree.map(lambda leaf: np.array(gather(leaf)), tree)


def _restore_target(mesh: Mesh, shapes: Tree) -> Tree:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        _shardings(mesh, shapes),
    )
