"""How much work a function does: its operations, counted in its jaxpr.

Everything that is computed counts, including products that a mask discards and values that a backward pass
recomputes. The rules:

- a multiply-add of a product is 2 FLOPs, a complex one 8;
- a real transform of n points is 2.5 n log2 n FLOPs, a complex one 5 n log2 n;
- any other operation is 1 FLOP per element of its result (complex 2, a complex product 6); a sum is 1 per
  element that it reads;
- operations on integers and booleans (positions and masks) are free, and so is moving data;
- a loop's body counts once per round; of several branches, the one with the most FLOPs counts;
- of a linear solve that is defined by functions (`custom_linear_solve`), only the solving function counts.

Bytes are the bytes of the arguments, of the results, and of the arrays that products, transforms, sums and
loops return. That is the least traffic of the program as written, if every other operation is fused with its
consumer and the arrays of one round of a loop stay in the cache.
"""

from collections.abc import Callable, Iterable
from math import ceil, log2, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr


class Work(NamedTuple):
    """A program's FLOPs by kind, and the bytes that it has to read or write."""

    products: float = 0.0
    """FLOPs of matrix products and convolutions."""
    transforms: float = 0.0
    other: float = 0.0
    """FLOPs of everything else: elementwise operations and sums."""
    bytes: float = 0.0
    open_loops: int = 0
    """Loops whose number of rounds is unknown before they run; each is counted as one round."""

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return self.products + self.transforms + self.other


def count(function: Callable, *args: Any) -> Work:
    """The work of `function(*args)`; the arguments are pytrees of arrays or `jax.ShapeDtypeStruct`s."""
    return count_jaxpr(jax.make_jaxpr(function)(*args).jaxpr)


def count_jaxpr(jaxpr: Jaxpr) -> Work:
    """The work of a function's jaxpr."""
    ends = sum(_bytes(variable) for variable in (*jaxpr.invars, *jaxpr.outvars))
    return _add([Work(bytes=ends), _of_jaxpr(live(jaxpr))])


def live(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without what its results do not depend on, which a derivative leaves and XLA removes."""
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def called(equation: JaxprEqn) -> list[Jaxpr]:
    """The functions that an equation runs; of a linear solve defined by functions, the one that solves."""
    if equation.primitive.name == "custom_linear_solve":
        return [equation.params["jaxprs"].solve.jaxpr]
    return list(jaxprs_in_params(equation.params))


def _add(works: Iterable[Work]) -> Work:
    return Work(*map(sum, zip(Work(), *works, strict=True)))


def _times(work: Work, rounds: float) -> Work:
    """The work of `rounds` rounds; the arrays of a round stay in the cache."""
    return work._replace(
        products=rounds * work.products,
        transforms=rounds * work.transforms,
        other=rounds * work.other,
        bytes=0.0,
    )


def _of_jaxpr(jaxpr: Jaxpr) -> Work:
    return _add(map(_of_equation, jaxpr.eqns))


def _of_equation(equation: Any) -> Work:
    name, params = equation.primitive.name, equation.params
    written = sum(map(_bytes, equation.outvars))
    match name:
        case "dot_general":
            ((contracted, _), _) = params["dimension_numbers"]
            terms = prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            return Work(products=terms * _flops(equation.outvars[0], 2, 8), bytes=written)
        case "conv_general_dilated":
            taps = equation.invars[1].aval
            terms = taps.size // taps.shape[params["dimension_numbers"].rhs_spec[0]]
            return Work(products=terms * _flops(equation.outvars[0], 2, 8), bytes=written)
        case "fft":
            argument, result = equation.invars[0].aval, equation.outvars[0].aval
            n = prod(params["fft_lengths"])
            factor = 5.0 if _is_complex(argument) and _is_complex(result) else 2.5
            rows = prod(argument.shape[: argument.ndim - len(params["fft_lengths"])])
            return Work(transforms=factor * rows * n * log2(max(n, 2)), bytes=written)
        case "scan":
            return _times(_of_jaxpr(params["jaxpr"].jaxpr), params["length"])._replace(bytes=written)
        case "while":
            body, rounds = _of_jaxpr(params["body_jaxpr"].jaxpr), _rounds(equation)
            if rounds is None:
                return body._replace(bytes=written, open_loops=body.open_loops + 1)
            return _times(body, rounds)._replace(bytes=written)
        case "cond":
            branches = [_of_jaxpr(branch.jaxpr) for branch in params["branches"]]
            return max(branches, key=lambda work: work.flops)
        case "pallas_call":
            programs = prod(n for n in params["grid_mapping"].grid if isinstance(n, int))
            return _times(_of_jaxpr(params["jaxpr"]), programs)._replace(bytes=written)
        case "shard_map":
            shard, n_shards = _of_jaxpr(params["jaxpr"]), params["mesh"].size
            return _times(shard, n_shards)._replace(bytes=n_shards * shard.bytes)
    if name in MOVES:
        return Work()
    if name.startswith(SUMS):  # a scatter reads (operand, indices, updates)
        read = equation.invars[2 if name.startswith("scatter") else 0]
        return Work(other=_flops(read, 1, 2), bytes=written)
    if inner := called(equation):  # jit, remat, custom derivatives, linear solves
        return _add(map(_of_jaxpr, inner))
    of_complex = 6 if name in ("mul", "div") else 2
    return Work(other=sum(_flops(result, 1, of_complex) for result in equation.outvars))


# Primitives that move, select or compare elements, or read and write a kernel's references.
MOVES = frozenset(
    """
    all_gather all_to_all argmax argmin bitcast_convert_type broadcast_in_dim complex concatenate conj
    convert_element_type copy copy_p dynamic_slice dynamic_update_slice expand_dims gather get imag iota
    optimization_barrier pad ppermute pvary real reduce_precision reshape rev scatter select_n
    sharding_constraint slice split squeeze stop_gradient swap transpose
    """.split()
)
# Prefixes of primitives that read each element once: sums, maxima, running sums, added updates.
SUMS = ("reduce", "cum", "scatter")


def _flops(variable: Any, real: int, of_complex: int) -> int:
    aval = variable.aval
    if not hasattr(aval, "dtype") or not jnp.issubdtype(aval.dtype, jnp.inexact):
        return 0
    return aval.size * (of_complex if _is_complex(aval) else real)


def _rounds(loop: Any) -> int | None:
    """The rounds of a `while` that counts up from a constant to a constant in constant steps; else None."""
    body, cond = loop.params["body_jaxpr"].jaxpr, loop.params["cond_jaxpr"].jaxpr
    if [test.primitive.name for test in cond.eqns] != ["lt"]:
        return None
    counter, stop = cond.eqns[0].invars
    if isinstance(counter, Literal) or not isinstance(stop, Literal):
        return None
    # The constants of both functions come before the carried values.
    i = cond.invars.index(counter) - loop.params["cond_nconsts"]
    before = body.invars[loop.params["body_nconsts"] + i]
    start = loop.invars[loop.params["cond_nconsts"] + loop.params["body_nconsts"] + i]
    for update in body.eqns:
        if update.outvars[0] is body.outvars[i] and update.primitive.name == "add":
            counted, step = update.invars
            if counted is before and isinstance(step, Literal) and isinstance(start, Literal):
                return max(0, ceil((stop.val - start.val) / step.val))
    return None


def _bytes(variable: Any) -> int:
    aval = variable.aval
    return aval.size * aval.dtype.itemsize if hasattr(aval, "dtype") and hasattr(aval, "size") else 0


def _is_complex(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.complexfloating)
