"""`hyena-jax bench function`: functions of a user's file, under the rules of the other benchmarks."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.benchmark.operators import BOTH, FORWARD
from hyena_jax.benchmark.results import Cells, Picture, Results, describe_device, milliseconds, panels
from hyena_jax.benchmark.runner import Benchmark, Case, Measurement, cost_cells, work_cells
from hyena_jax.benchmark.settings import Function
from hyena_jax.benchmark.timing import jit_program
from hyena_jax.benchmark.verify import TOLERANCE, compare
from hyena_jax.config import own_code
from hyena_jax.config.plugins import import_parts
from hyena_jax.ops.counts import count
from hyena_jax.system.errors import UserError, require


def make(settings: Function) -> Benchmark:
    """The functions over the sizes.

    Raises:
      UserError: if the file cannot be imported, or lacks a function.
    """
    file, _, names = settings.target.rpartition(":")
    with own_code(f"{file!r} cannot be imported"):
        module = import_parts(file)
    functions = {name: getattr(module, name, None) for name in dict.fromkeys(names.split(","))}
    for name, function in {**functions, "make_inputs": getattr(module, "make_inputs", None)}.items():
        if not callable(function):
            raise UserError(f"{file} has no function {name}")
    sizes, oracle = sorted(settings.sizes), getattr(module, "oracle", None)
    return Benchmark(
        methods=list(functions),
        sizes=[{"size": size} for size in sizes],
        check=lambda name: check(name, functions[name], oracle, inputs(module, sizes[0])),
        build=lambda name, size: build(functions[name], inputs(module, size["size"]), settings.gradients),
        cells=partial(cells, settings.gradients),
        picture=picture,
        roofline_dtype="float32",
    )


def inputs(module: Any, size: int) -> tuple:
    """The arguments of the functions, as JAX arrays.

    Raises:
      UserError: unless `make_inputs` returns a tuple or a list of arrays.
    """
    found, called = module.make_inputs(size), f"make_inputs({size})"
    require(isinstance(found, tuple | list), called, type(found).__name__, "a tuple of arrays")
    for leaf in jax.tree.leaves(found):
        is_number = np.asarray(leaf).dtype.kind in "biufcV"  # V: bfloat16 and smaller floats
        require(is_number, called, type(leaf).__name__, "a tuple of arrays of numbers")
    return jax.tree.map(jnp.asarray, tuple(found))


def check(name: str, function: Callable, oracle: Callable | None, args: tuple) -> bool:
    """Raises `verify.Mismatch` unless every result equals the oracle's; returns whether there is one."""
    with own_code("your plugin failed"):
        jax.eval_shape(function, *args)  # results that are not arrays are refused
    if oracle is None:
        return False
    exact = jax.tree.map(lambda x: np.float64(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, args)
    found, structure = jax.tree.flatten(jax.jit(function)(*args))
    expected, of_oracle = jax.tree.flatten(oracle(*exact))
    allowed = f"as many arrays as {name} returns, {structure}"
    require(len(found) == len(expected), "oracle", str(of_oracle), allowed)
    for actual, exactly in zip(found, expected, strict=True):
        dtype, shape = str(actual.dtype), np.shape(exactly)
        require(shape == actual.shape, "a result of oracle", shape, f"of the shape {actual.shape}")
        compare(name, actual, np.asarray(exactly), dtype if dtype in TOLERANCE else "float32")
    return True


def build(function: Callable, args: tuple, with_gradients: bool) -> Case:
    """Compiles the passes, and counts their operations.

    Raises:
      UserError: if there should be gradients, of a function that returns integers.
    """
    leaves, structure = jax.tree.flatten(args)
    is_real = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def both(args: tuple, cotangent: Any) -> tuple[Any, Any]:
        """y, and the gradients of the inputs in floating point."""
        leaves = jax.tree.leaves(args)

        def of_real(real: list) -> Any:
            given = iter(real)
            mixed = [next(given) if kind else x for x, kind in zip(leaves, is_real, strict=True)]
            return function(*structure.unflatten(mixed))

        y, pullback = jax.vjp(of_real, [x for x, kind in zip(leaves, is_real, strict=True) if kind])
        return y, pullback(cotangent)

    passes = {FORWARD: (function, args)}
    if with_gradients:
        y = jax.eval_shape(function, *args)
        for leaf in jax.tree.leaves(y):
            is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
            require(is_float, "gradients", True, f"off (--no-gradients): a result is {leaf.dtype}")
        passes[BOTH] = both, (args, jax.tree.map(lambda y: jnp.ones(y.shape, y.dtype), y))
    works = {part: count(of, *values) for part, (of, values) in passes.items()}
    programs = {part: jit_program(of, *values) for part, (of, values) in passes.items()}
    return Case(programs, {}, works)


def cells(with_gradients: bool, row: Measurement) -> Iterator[Cells]:
    """The line of a function and size."""
    last = row.passes[BOTH if with_gradients else FORWARD]
    both = {"forward + backward ms": milliseconds(last.seconds)} if with_gradients else {}
    times = {"forward ms": milliseconds(row.passes[FORWARD].seconds), **both}
    size = {"size": f"{row.size['size']:,}"}
    yield {"function": row.method, **size, **times, **cost_cells(last), **work_cells(last)}


def picture(results: Results) -> Picture:
    """Time and memory of the longest pass, by size."""
    part = BOTH if results["settings"]["gradients"] else FORWARD
    points = [(row["method"], row["size"], row["passes"][part]) for row in results["rows"]]
    title = f"{results['settings']['target']}; {describe_device(results)}"
    return Picture(title, "size", panels(points, f", {part.replace('_', ' + ')}"))
