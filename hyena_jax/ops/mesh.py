"""Functions of whole arrays, run on the shards of rows and lengths that the devices of a mesh hold.

Axes: B batch, L length, C channels.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

ROWS, LENGTH, CHANNELS = "BLC"


def sharded(
    local: Callable[..., Any], sequence_axis: str | None, in_axes: tuple[str, ...], out_axes: str
) -> Callable[..., Any]:
    """`local(*arrays, axis_name)` as a function of whole arrays.

    Without an ambient mesh, `local` gets the whole arrays and `axis_name=None`. With one, it runs under
    `over_shards` on each device's shards, and `axis_name` names the axis of its collectives, if any.
    """
    local = partial(local, axis_name=sequence_axis)
    has_mesh = bool(jax.sharding.get_abstract_mesh().auto_axes)
    return over_shards(local, sequence_axis, in_axes, out_axes) if sequence_axis or has_mesh else local


def over_shards(
    f: Callable[..., Any], sequence_axis: str | None, in_axes: tuple[str, ...], out_axes: str
) -> Callable[..., Any]:
    """`f(*local arrays)` as a function of the whole arrays, inside `jit` with a mesh (`jax.set_mesh`).

    Axes are written as letters, a string for each argument (which may be None), and one for every array of
    the result. `L` and `C` are sharded over the mesh axis `sequence_axis`, unless that is None, and `B` over
    all other axes of the mesh (if their sizes do not divide it, every device holds all rows). Any other
    letter is an axis that every device holds whole. Arrays without some of these axes are cast to vary along
    the missing mesh axes, so that their gradients are summed over the devices.

    The call raises ValueError if the mesh has no axis `sequence_axis`, or its size does not divide L or C.
    """

    def mapped(*args: jax.Array | None) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        n_devices = 1 if sequence_axis is None else axis_size(sequence_axis)
        for x, axes in zip(args, in_axes, strict=True):
            for axis, size in zip(axes, () if x is None else x.shape, strict=x is not None):
                if axis in (LENGTH, CHANNELS) and size % n_devices:
                    what = "sequence length" if axis == LENGTH else "channels of a filter"
                    must = f"a multiple of the {n_devices} devices along {sequence_axis!r}"
                    raise ValueError(f"{what} must be {must}, got {size}")
        others = tuple(name for name in mesh.axis_names if name != sequence_axis)
        rows = args[0].shape[in_axes[0].index(ROWS)]
        if rows % prod(mesh.shape[name] for name in others):
            others = ()
        names = {ROWS: others or None, LENGTH: sequence_axis, CHANNELS: sequence_axis}

        def spec(axes: str) -> PartitionSpec:
            return PartitionSpec(*(names.get(axis) for axis in axes))

        def local(*shards: jax.Array | None) -> Any:
            return f(*(_vary(x, axes, names) for x, axes in zip(shards, in_axes, strict=True)))

        in_specs = tuple(spec(axes) for axes in in_axes)
        return jax.shard_map(local, in_specs=in_specs, out_specs=spec(out_axes))(*args)

    return mapped


def axis_size(sequence_axis: str) -> int:
    """Devices along an axis of the ambient mesh; ValueError if there is no such axis."""
    mesh = jax.sharding.get_abstract_mesh()
    if sequence_axis not in mesh.axis_names:
        raise ValueError(
            f"sequence_axis must be an axis of the ambient mesh (jax.set_mesh), which has "
            f"{mesh.axis_names}, got {sequence_axis!r}"
        )
    return mesh.shape[sequence_axis]


def shard_axis(x: jax.Array, sequence_axis: str | None, axis: int) -> jax.Array:
    """x, with `axis` sharded along `sequence_axis`, if that is not None and its size divides the axis."""
    if sequence_axis is None or x.shape[axis] % axis_size(sequence_axis):
        return x
    spec = PartitionSpec(*(sequence_axis if i == axis % x.ndim else None for i in range(x.ndim)))
    return jax.lax.with_sharding_constraint(x, spec)


def with_before(x: jax.Array, n: int, axis: int, axis_name: str) -> jax.Array:
    """This device's x, with the n entries along `axis` before it; zeros before the sequence starts.

    The entries come from as many earlier devices as needed, by one `ppermute` each.
    """
    length, n_devices = x.shape[axis], jax.lax.axis_size(axis_name)
    parts = [x]
    for hop in range(1, -(-n // length) + 1):
        # A device without a sender receives zeros.
        ring = [(i, i + hop) for i in range(n_devices - hop)]
        size = min(length, n - (hop - 1) * length)
        last = jax.lax.slice_in_dim(x, length - size, length, axis=axis)
        parts.insert(0, jax.lax.ppermute(last, axis_name, ring))
    return jnp.concatenate(parts, axis)


def shape_like(x: jax.Array) -> jax.ShapeDtypeStruct:
    """The shape and type of x; under `shard_map` also the mesh axes along which it varies."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def state_before(
    join: Callable[[Any, Any], Any], start: Any, part: Any, axis_name: str, reverse: bool = False
) -> Any:
    """The state before this device's shard; `join(state, part)` is the state after a shard.

    `start` is the state before the first shard (in reverse, the last), `part` what this shard does to any.
    """
    parts = jax.lax.all_gather(part, axis_name)

    def advance(state: Any, part: Any) -> tuple[Any, Any]:
        return join(state, part), state

    states = jax.lax.scan(advance, start, parts, reverse=reverse)[1]
    index = jax.lax.axis_index(axis_name)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), states)


def _vary(x: jax.Array | None, axes: str, names: dict[str, Any]) -> jax.Array | None:
    """x cast to vary along all mesh axes in use."""
    if x is None:
        return None
    missing = () if ROWS in axes else names[ROWS] or ()
    if names[LENGTH] is not None and LENGTH not in axes and CHANNELS not in axes:
        missing = (*missing, names[LENGTH])
    return jax.lax.pcast(x, missing, to="varying") if missing else x
