"""The cost of Pallas kernels for a TPU on paper: what they compute and read, counted from their jaxprs.

Axes: P points of a kernel's grid.

Estimated, not measured on a device. The counts are what no schedule avoids, so that a kernel's time is at
least the largest of the three terms: a kernel also loads and stores registers, waits for results, and starts
its blocks.
"""

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from hyena_jax.ops.counts import called, live

# bfloat16 products for one product of float32 factors.
PASSES = {jax.lax.Precision.DEFAULT: 1, jax.lax.Precision.HIGH: 3, jax.lax.Precision.HIGHEST: 6}
# One operation for each entry of the result; conversions between types included.
ELEMENTWISE = frozenset(
    """abs add and ceil clamp convert_element_type cos div eq erf exp exp2 expm1 floor ge gt integer_pow
    is_finite le log log1p logistic lt max min mul ne neg not or pow rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sqrt square sub tan tanh xor""".split()
)
# One operation for each entry of the argument.
REDUCTIONS = frozenset("cumsum reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum".split())
# Types as HLO names them; only those of arrays that kernels of this package return.
ELEMENTS = {"bfloat16": "bf16", "float32": "f32", "int32": "s32"}

# What is known of a variable of a kernel before it runs: a scalar at every point of the grid [P], or nothing.
Known = np.ndarray | None


class KernelWork(NamedTuple):
    """Computation."""

    products: float
    """FLOPs of the matrix unit, counted in passes of bfloat16 products."""
    vector: float
    """Operations of the vector unit, in whole registers: one on [1, 128] counts as one on [8, 128]."""

    def plus(self, other: "KernelWork") -> "KernelWork":
        return KernelWork(self.products + other.products, self.vector + other.vector)


class Kernel(NamedTuple):
    """One `pallas_call`."""

    name: str
    hbm_bytes: int
    """Blocks read and written, again when their index changes from one point of the grid to the next."""
    work: KernelWork
    """Over the whole grid."""
    results: tuple[str, ...]
    """The arrays that it returns, such as `f32[8,128]`, as HLO names them."""


def kernels(jaxpr: core.ClosedJaxpr) -> list[Kernel]:
    """The Pallas kernels of a function, each as often as it is called in its jaxpr; not those that XLA drops.

    ValueError if a kernel's branches and loops do not follow from the position in its grid.
    """
    return [_kernel(eqn) for eqn in _pallas_calls(live(jaxpr.jaxpr))]


def _pallas_calls(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            for inner in called(eqn):
                yield from _pallas_calls(inner)


def _kernel(eqn: core.JaxprEqn) -> Kernel:
    jaxpr, mapping = eqn.params["jaxpr"], eqn.params["grid_mapping"]
    grid = tuple(mapping.grid)
    points = np.indices(grid).reshape(len(grid), prod(grid))
    hbm_bytes = sum(_block_bytes(block, grid, points) for block in mapping.block_mappings)
    work, _ = _count(jaxpr, [None] * len(jaxpr.invars), np.ones(points.shape[1]), grid, points)
    results = (v.aval for v in eqn.outvars)
    named = (f"{ELEMENTS.get(x.dtype.name, x.dtype.name)}[{','.join(map(str, x.shape))}]" for x in results)
    return Kernel(eqn.params["name"], hbm_bytes, work, tuple(named))


def _block_bytes(mapping: Any, grid: tuple[int, ...], points: np.ndarray) -> int:
    """Bytes of the blocks at the points of the grid, in order, without repetitions; without padding."""
    once = np.ones(points.shape[1])
    _, found = _count(mapping.index_map_jaxpr.jaxpr, list(points), once, grid, points)
    index = np.stack([np.broadcast_to(_require(i), points.shape[1:]) for i in found])
    moves = np.concatenate([[True], (index[:, 1:] != index[:, :-1]).any(0)])
    sizes = [getattr(dim, "block_size", 1) for dim in mapping.block_shape]
    array = mapping.array_aval
    inside = [
        np.minimum(size, length - i * size) for i, size, length in zip(index, sizes, array.shape, strict=True)
    ]
    return int(prod(inside)[moves].sum()) * array.dtype.itemsize


def _count(
    jaxpr: core.Jaxpr, args: list[Known], times: np.ndarray, grid: tuple[int, ...], points: np.ndarray
) -> tuple[KernelWork, list[Known]]:
    """The work of running a jaxpr `times` [P] times at each point of the grid, and its known results.

    Which branches run and how often loops repeat follows from scalars computed from the position in the grid.
    """
    values = dict(zip(jaxpr.invars, args, strict=True))

    def known(v: core.Var | core.Literal) -> Known:
        if not isinstance(v, core.Literal):
            return values.get(v)
        return np.full(times.shape, v.val) if np.ndim(v.val) == 0 else None

    def inner(jaxpr: core.Jaxpr, args: list[Known], times: np.ndarray) -> tuple[KernelWork, list[Known]]:
        return _count(jaxpr, args, times, grid, points)

    total = KernelWork(0, 0)
    for eqn in jaxpr.eqns:
        inputs, params = [known(v) for v in eqn.invars], eqn.params
        work, results = KernelWork(0, 0), [None] * len(eqn.outvars)
        match name := eqn.primitive.name:
            case "program_id":
                results = [points[params["axis"]]]
            case "num_programs":
                results = [np.full(times.shape, grid[params["axis"]])]
            case "cond":
                for i, branch in enumerate(params["branches"]):
                    taken = times * (_require(inputs[0]) == i)
                    work = work.plus(inner(branch.jaxpr, inputs[1:], taken)[0])
            case "while":
                body = params["body_jaxpr"].jaxpr
                work, _ = inner(body, [None] * len(body.invars), times * _trips(params, inputs))
            case "scan":
                body = params["jaxpr"].jaxpr
                work, _ = inner(body, [None] * len(body.invars), times * params["length"])
            case "jit" | "pjit" | "closed_call" | "custom_vjp_call":
                closed = params.get("jaxpr") or params["call_jaxpr"]
                work, results = inner(closed.jaxpr, inputs, times)
            case _:
                work = _work(eqn, times.sum())
                if name in ELEMENTWISE and all(x is not None for x in inputs):
                    results = [np.asarray(jax.vmap(partial(eqn.primitive.bind, **eqn.params))(*inputs))]
        total = total.plus(work)
        values.update(zip(eqn.outvars, results, strict=True))
    return total, [known(v) for v in jaxpr.outvars]


def _trips(params: dict[str, Any], inputs: list[Known]) -> np.ndarray:
    """How often a `fori_loop` runs, whose condition is i < n and whose i grows by 1."""
    condition = params["cond_jaxpr"].jaxpr
    args = inputs[: params["cond_nconsts"]] + inputs[params["cond_nconsts"] + params["body_nconsts"] :]
    values = dict(zip(condition.invars, args, strict=True))
    if [eqn.primitive.name for eqn in condition.eqns] != ["lt"]:
        _require(None)
    i, n = (
        np.asarray(v.val) if isinstance(v, core.Literal) else _require(values[v])
        for v in condition.eqns[0].invars
    )
    return np.maximum(n - i, 0)


def _require(value: Known) -> np.ndarray:
    if value is None:
        raise ValueError(
            "a kernel can be counted only if its branches and loops depend only on the position in the grid, "
            "but this kernel's depend on data: use jnp.where, or a loop of fixed length"
        )
    return value


def _work(eqn: core.JaxprEqn, times: float) -> KernelWork:
    """The work of one operation on arrays."""
    name = eqn.primitive.name
    if name == "dot_general":
        return KernelWork(times * _product_flops(eqn), 0)
    if name in ELEMENTWISE:
        return KernelWork(0, times * _in_registers(eqn.outvars[0].aval.shape))
    if name in REDUCTIONS:
        return KernelWork(0, times * _in_registers(eqn.invars[0].aval.shape))
    return KernelWork(0, 0)


def _product_flops(eqn: core.JaxprEqn) -> float:
    """2 M N K, times the passes."""
    left, right = (v.aval for v in eqn.invars)
    (contracted, _), _ = eqn.params["dimension_numbers"]
    passes = 1
    if left.dtype == right.dtype == np.float32:
        precision = eqn.params["precision"] or (jax.lax.Precision.DEFAULT,) * 2
        passes = max(PASSES[p] for p in precision)
    return 2.0 * passes * prod(left.shape[i] for i in contracted) * eqn.outvars[0].aval.size


def _in_registers(shape: tuple[int, ...]) -> int:
    """The entries of the registers [8, 128] that hold an array; none for a scalar, which has its own unit."""
    if not shape:
        return 0
    *lead, rows, columns = (1, *shape)
    return prod(lead) * (-(-rows // 8) * 8) * (-(-columns // 128) * 128)
