"""Checks JAX's transformations of a function against central differences."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tolerances import DIFFERENCE_TOLERANCE, TOLERANCE

STEP = 1e-7


def check_modes(f: Callable[[Any], Any], args: Any, is_thorough: bool = False) -> None:
    """Along a random direction, in float64 (inside `jax.enable_x64`):

    the tangent and the forward-over-reverse Hessian-vector product equal central differences of the value and
    of the gradient, both computed under `vmap`; the gradient equals central differences of a loss. With
    `is_thorough` also: `linearize` equals `jvp`, the other orders of the two modes give the same product, and
    `vmap` gives the same as separate calls.

    Args:
      f: function of the tree `args` that returns an array or a tree of arrays.
    """
    args = jax.tree.map(lambda x: jnp.asarray(np.float64(x)), args)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape)), args)
    weight = jax.tree.map(lambda y: rng.standard_normal(y.shape), jax.eval_shape(f, args))

    def loss(args):
        terms = jax.tree.map(lambda w, y: (w * y * (1 + y)).sum(), weight, f(args))
        return sum(jax.tree.leaves(terms))

    def tangent(direction):
        return jax.jvp(f, (args,), (direction,))[1]

    def curvature(direction):
        return jax.jvp(jax.grad(loss), (args,), (direction,))[1]

    def reverse_twice(direction):
        def slope(args):
            products = jax.tree.map(lambda g, d: (g * d).sum(), jax.grad(loss)(args), direction)
            return sum(jax.tree.leaves(products))

        return jax.grad(slope)(args)

    def reverse_over_forward(direction):
        return jax.grad(lambda args: jax.jvp(loss, (args,), (direction,))[1])(args)

    def stacked(*factors):
        return jax.tree.map(lambda d: jnp.stack([factor * d for factor in factors]), direction)

    @jax.jit
    def results():
        moved = jax.tree.map(lambda x, d: x + d, args, stacked(STEP, -STEP))
        found = {
            "values": jax.vmap(f)(moved),
            "gradients": jax.vmap(jax.grad(loss))(moved),
            "tangent": tangent(direction),
            "curvature": curvature(direction),
        }
        if is_thorough:
            found |= {
                "linearized": jax.linearize(f, args)[1](direction),
                "mapped_values": jax.lax.map(f, moved),
                "mapped_gradients": jax.lax.map(jax.grad(loss), moved),
                "reverse_twice": reverse_twice(direction),
                "reverse_over_forward": reverse_over_forward(direction),
                "tangents": jax.vmap(tangent)(stacked(1, -2)),
                "curvatures": jax.vmap(curvature)(stacked(1, -2)),
            }
        return found

    found = jax.device_get(results())

    def difference(values):
        return jax.tree.map(lambda x: (x[0] - x[1]) / (2 * STEP), values)

    def twice(values):
        return jax.tree.map(lambda x: np.stack([x, -2 * x]), values)

    losses = jax.tree.map(lambda w, y: (w * y * (1 + y)).reshape(2, -1).sum(axis=1), weight, found["values"])
    slopes = jax.tree.map(lambda g, d: (g.mean(axis=0) * d).sum(), found["gradients"], direction)
    expected = difference(sum(jax.tree.leaves(losses)))
    assert_trees_close(sum(jax.tree.leaves(slopes)), expected, DIFFERENCE_TOLERANCE)
    assert_trees_close(found["tangent"], difference(found["values"]), DIFFERENCE_TOLERANCE)
    assert_trees_close(found["curvature"], difference(found["gradients"]), DIFFERENCE_TOLERANCE)
    if is_thorough:
        assert_trees_close(found["linearized"], found["tangent"])
        assert_trees_close(found["mapped_values"], found["values"])
        assert_trees_close(found["mapped_gradients"], found["gradients"])
        assert_trees_close(found["reverse_twice"], found["curvature"])
        assert_trees_close(found["reverse_over_forward"], found["curvature"])
        assert_trees_close(found["tangents"], twice(found["tangent"]))
        assert_trees_close(found["curvatures"], twice(found["curvature"]))


def assert_trees_close(actual: Any, expected: Any, tolerance: float = 1e3 * TOLERANCE["float64"]) -> None:
    """Leaf by leaf, relative to the largest magnitude of all leaves."""
    scale = max(np.abs(leaf).max(initial=0.0) for leaf in jax.tree.leaves(expected))
    assert scale > 0
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)
