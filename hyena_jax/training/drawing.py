"""Initial parameters, drawn by a program that does not grow with a model's depth.

Flax draws each parameter from a key of its own: the root key, with a hash of the parameter's path folded in.
Parameters that differ in their hashes alone are of one kind, and are drawn here by one loop over the hashes,
with the same bits.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

Tree = Any


class Recipe(NamedTuple):
    """How an array is made from the root key, and from the root key with each of the hashes folded in."""

    kind: Hashable
    make: ClosedJaxpr
    hashes: tuple[int, ...]


def by_kind(init: Callable[[jax.Array], Tree]) -> Callable[[jax.Array], Tree]:
    """A function with the values of init(key), a tree of arrays; it traces `init` here, and compiles once."""
    closed, shapes = jax.make_jaxpr(init, return_shape=True)(jax.random.key(0))
    kinds: dict[Hashable, list[Recipe]] = {}
    places = []
    for recipe in recipes(closed):
        alike = kinds.setdefault(recipe.kind, [])
        places.append((list(kinds).index(recipe.kind), len(alike)))
        alike.append(recipe)

    def stack(key: jax.Array, alike: list[Recipe]) -> jax.Array:
        make = jaxpr_as_fun(alike[0].make)

        def one(hashes: jax.Array) -> jax.Array:
            return make(key, *(jax.random.fold_in(key, own) for own in hashes))[0]

        return jax.lax.map(one, np.asarray([recipe.hashes for recipe in alike], np.uint32))

    @jax.jit
    def stacks_of(key: jax.Array) -> list[jax.Array]:
        """The arrays of each kind [n, ...]."""
        return [stack(key, alike) for alike in kinds.values()]

    def draw(key: jax.Array) -> Tree:
        stacks = stacks_of(key)
        is_traced = isinstance(stacks[0], jax.core.Tracer)  # for shapes, or to be sharded
        if not is_traced:  # NumPy cuts them: a program that does so grows with depth
            stacks = jax.device_get(stacks)
        leaves = [stacks[kind][row] for kind, row in places]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves if is_traced else jax.device_put(leaves))

    return draw


def recipes(closed: ClosedJaxpr) -> list[Recipe]:
    """One for each output of a jaxpr whose only input is the root key."""
    jaxpr = closed.jaxpr
    (root,) = jaxpr.invars
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    made_by = {var: (i, eqn) for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}

    def is_own_key(eqn: JaxprEqn) -> bool:
        folds = eqn.primitive.name == "random_fold_in" and eqn.invars[0] is root
        return folds and isinstance(eqn.invars[1], Literal)

    def recipe(out: Var) -> Recipe:
        needed, pending = {}, [out]
        while pending:
            var = pending.pop()
            if isinstance(var, Literal) or var not in made_by:
                continue
            i, eqn = made_by[var]
            if i not in needed:
                needed[i] = eqn
                pending += [] if is_own_key(eqn) else eqn.invars
        eqns = [needed[i] for i in sorted(needed)]
        keys, eqns = [eqn for eqn in eqns if is_own_key(eqn)], [eqn for eqn in eqns if not is_own_key(eqn)]
        read = {id(var) for eqn in eqns for var in eqn.invars} | {id(out)}
        constvars = [var for var in consts if id(var) in read]
        values = [consts[var] for var in constvars]
        made = jaxpr.replace(
            constvars=constvars,
            invars=[root, *(eqn.outvars[0] for eqn in keys)],
            outvars=[out],
            eqns=eqns,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        arrays = [np.asarray(value) for value in (*values, *_inner_constants(eqns))]
        kind = str(made), *((str(array.dtype), array.shape, array.tobytes()) for array in arrays)
        return Recipe(kind, ClosedJaxpr(made, values), tuple(int(eqn.invars[1].val) for eqn in keys))

    return [recipe(out) for out in jaxpr.outvars]


def _inner_constants(eqns: Iterable[JaxprEqn]) -> Iterator[Any]:
    """What the programs inside of these equations close over, which no text of them shows."""
    for eqn in eqns:
        for value in jax.tree.leaves(eqn.params):
            yield from getattr(value, "consts", ())
            yield from _inner_constants(getattr(value, "eqns", ()))
