"""`hyena-jax bench function`: functions of a user's file, under the rules of the other benchmarks."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.benchmark.results import (
    Cells,
    Picture,
    Results,
    Row,
    cost_cells,
    milliseconds,
    panels,
    work_cells,
)
from hyena_jax.benchmark.runner import BOTH, FORWARD, Benchmark, Case, Size
from hyena_jax.benchmark.settings import Function
from hyena_jax.benchmark.timing import counted_program, forward_backward
from hyena_jax.benchmark.verify import TOLERANCE, require_close
from hyena_jax.config import own_code
from hyena_jax.config.plugins import import_parts
from hyena_jax.system.errors import UserError, require


class FunctionBenchmark(Benchmark):
    """The functions over the sizes."""

    roofline_dtype = "float32"

    def __init__(self, settings: Function):
        file, _, names = settings.target.rpartition(":")
        with own_code(f"{file!r} cannot be imported"):
            module = import_parts(file)
        self.settings, self.methods = settings, list(dict.fromkeys(names.split(",")))
        found = {name: getattr(module, name, None) for name in (*self.methods, "make_inputs")}
        for name, function in found.items():
            if not callable(function):
                raise UserError(f"{file} has no function {name}")
        self.functions, self.oracle = found, getattr(module, "oracle", None)
        self.sizes = [{"size": size} for size in sorted(settings.sizes)]

    def _inputs(self, size: int) -> tuple:
        called = f"make_inputs({size})"
        with own_code(f"{called} failed"):
            found = self.functions["make_inputs"](size)
            require(isinstance(found, tuple | list), called, type(found).__name__, "a tuple of arrays")
            for leaf in jax.tree.leaves(found):
                is_number = np.asarray(leaf).dtype.kind in "biufcV"  # V: bfloat16 and smaller floats
                require(is_number, called, type(leaf).__name__, "a tuple of arrays of numbers")
            return jax.tree.map(jnp.asarray, tuple(found))

    def check(self, method: str) -> bool:
        function, args = self.functions[method], self._inputs(self.sizes[0]["size"])
        with own_code("your plugin failed"):
            jax.eval_shape(function, *args)  # results that are not arrays are refused
        if self.oracle is None:
            return False
        exact = jax.tree.map(lambda x: np.float64(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, args)
        found, structure = jax.tree.flatten(jax.jit(function)(*args))
        with own_code("oracle failed"):
            expected, of_oracle = jax.tree.flatten(self.oracle(*exact))
            expected = [np.asarray(leaf) + 0 for leaf in expected]  # only numbers can be added
        allowed = f"as many arrays as {method} returns, {structure}"
        require(len(found) == len(expected), "oracle", str(of_oracle), allowed)
        for actual, exactly in zip(found, expected, strict=True):
            dtype, shape = str(actual.dtype), exactly.shape
            require(shape == actual.shape, "a result of oracle", shape, f"of the shape {actual.shape}")
            require_close(method, actual, exactly, dtype if dtype in TOLERANCE else "float32")
        return True

    def build(self, method: str, size: Size) -> Case:
        function, args = self.functions[method], self._inputs(size["size"])
        programs = {FORWARD: counted_program(function, *args)}
        if self.settings.gradients:
            y = jax.eval_shape(function, *args)
            for leaf in jax.tree.leaves(y):
                is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
                require(is_float, "gradients", True, f"off (--no-gradients): a result is {leaf.dtype}")
            cotangent = jax.tree.map(lambda y: jnp.ones(y.shape, y.dtype), y)
            programs[BOTH] = counted_program(forward_backward(function), args, cotangent)
        return Case(programs, {})

    def cells(self, row: Row) -> Iterator[Cells]:
        times = {f"{part.replace('_', ' + ')} ms": milliseconds(each) for part, each in row["passes"].items()}
        last = row["passes"][BOTH if self.settings.gradients else FORWARD]
        size = f"{row['size']:,}"
        yield {"function": row["method"], "size": size, **times, **cost_cells(last), **work_cells(last)}

    @staticmethod
    def picture(results: Results) -> Picture:
        part = BOTH if results["settings"]["gradients"] else FORWARD
        points = [(row["method"], row["size"], row["passes"][part]) for row in results["rows"]]
        return Picture(results["settings"]["target"], "size", panels(points, f", {part.replace('_', ' + ')}"))
