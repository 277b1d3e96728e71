"""How an operator on local shards becomes one on whole arrays, by `shard_map` on the ambient mesh."""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
from jax.sharding import PartitionSpec

ROWS, LENGTH, CHANNELS = "BLC"


def over_shards(
    f: Callable[..., Any], sequence_axis: str, in_axes: tuple[str, ...], out_axes: str
) -> Callable[..., Any]:
    """`f(*local arrays)` as a function of the whole arrays, inside `jit` with a mesh (`jax.set_mesh`).

    Axes are written as letters: `L` is cut into parts along the mesh axis `sequence_axis`, as is `C`, and `B`
    into parts along all other axes of the mesh (where these do not divide it, each holds all rows). Any other
    letter is an axis that every device has whole. Arrays without some of these axes are cast to vary along
    them, so that their derivatives are summed.

    Args:
      in_axes: one string for each argument; an argument may be None.
      out_axes: one string, for every array of the result.

    Raises:
      ValueError: when called, without an ambient mesh that has `sequence_axis`, or if that does not divide
        L or C.
    """

    def mapped(*args: jax.Array | None) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        n_devices = axis_size(sequence_axis)
        _check(args, in_axes, sequence_axis, n_devices)
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
    """Devices along an axis of the ambient mesh.

    Raises:
      ValueError: if there is no such axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if sequence_axis not in mesh.axis_names:
        raise ValueError(
            f"sequence_axis must be an axis of the ambient mesh (jax.set_mesh), which has "
            f"{mesh.axis_names}, got {sequence_axis!r}"
        )
    return mesh.shape[sequence_axis]


def share_out(x: jax.Array, sequence_axis: str, axis: int) -> jax.Array:
    """x, of which each device along `sequence_axis` is to compute one part of `axis`, if they divide it."""
    if x.shape[axis] % axis_size(sequence_axis):
        return x
    spec = PartitionSpec(*(sequence_axis if i == axis % x.ndim else None for i in range(x.ndim)))
    return jax.lax.with_sharding_constraint(x, spec)


def _vary(x: jax.Array | None, axes: str, names: dict[str, Any]) -> jax.Array | None:
    """x, cast to vary along all mesh axes in use."""
    if x is None:
        return None
    missing = () if ROWS in axes else names[ROWS] or ()
    if LENGTH not in axes and CHANNELS not in axes:
        missing = (*missing, names[LENGTH])
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _check(
    args: tuple[jax.Array | None, ...], in_axes: tuple[str, ...], sequence_axis: str, n_devices: int
) -> None:
    what = {LENGTH: "sequence length", CHANNELS: "channels of a filter"}
    for x, axes in zip(args, in_axes, strict=True):
        for axis, size in zip(axes, () if x is None else x.shape, strict=x is not None):
            if axis in what and size % n_devices:
                raise ValueError(
                    f"{what[axis]} must be a multiple of the {n_devices} devices along {sequence_axis!r}, "
                    f"got {size}"
                )
