"""Derivatives whose reverse mode is written by hand, and whose forward mode is not lost by that.

`jax.custom_vjp` refuses forward mode. Here the tangent is a linear map with a transpose of its own, made with
`jax.lax.custom_linear_solve`, which JAX differentiates any number of times in both modes, batches and shards.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


def own_derivative(
    forward: Callable[..., tuple[Any, Any]], pull_back: Callable[[Any, Any], tuple]
) -> Callable[..., Any]:
    """f(*args) = forward(*args)[0], whose gradients are computed by `pull_back`.

    Forward mode and derivatives of derivatives go through JAX's own derivative of `forward`.

    Args:
      forward: from arrays of floats to (y, residuals), differentiable in both modes.
      pull_back: (residuals, gradient with respect to y) -> a gradient for each argument.
    """

    @jax.custom_jvp
    def f(*args: Any) -> Any:
        return forward(*args)[0]

    @f.defjvp
    def jvp(args: tuple, args_dot: tuple) -> tuple[Any, Any]:
        y, residuals = forward(*args)

        def push_forward(args_dot: tuple) -> Any:
            return jax.jvp(lambda *args: forward(*args)[0], args, args_dot)[1]

        return y, linear_map(push_forward, partial(pull_back, residuals), args_dot)

    return f


def linear_map(f: Callable[[Tree], Any], transpose: Callable[[Any], Tree], x: Tree) -> Any:
    """f(x), where f is linear, with `transpose` in place of JAX's own transpose of f.

    With A = [[1, 0], [-f, 1]], the solution of A (x', y) = (x, 0) is x' = x and y = f(x); that of the
    transposed equation A^T (x', y) = (0, y_bar) is x' = transpose(y_bar).
    """

    def matvec(pair: tuple) -> tuple:
        x, y = pair
        return x, jax.tree.map(jnp.subtract, y, f(x))

    def solve(_: Callable, pair: tuple) -> tuple:
        x, y = pair
        return x, jax.tree.map(jnp.add, y, f(x))

    def transpose_solve(_: Callable, pair: tuple) -> tuple:
        x, y = pair
        return jax.tree.map(jnp.add, x, transpose(y)), y

    zeros = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(f, x))
    return tied(jax.lax.custom_linear_solve(matvec, tied((x, zeros)), solve, transpose_solve))[1]


def tied(tree: Tree) -> Tree:
    """The tree, with every leaf made to depend on all of them: by a sum over nothing, which XLA drops.

    `custom_linear_solve` is transposed only where all of its right-hand side has a tangent.
    """
    leaves = jax.tree.leaves(tree)
    nothing = sum(jax.lax.slice_in_dim(x.reshape(-1), 0, 0).sum().astype(jnp.float32) for x in leaves)
    return jax.tree.map(lambda leaf: leaf + nothing.astype(leaf.dtype), tree)
