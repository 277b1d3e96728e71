"""Functions with a hand-written reverse mode that keep their forward mode, and the sums that such modes need.

`jax.custom_vjp` refuses forward mode. Here the tangent is a linear map with its own transpose, made with
`jax.lax.custom_linear_solve`, which JAX differentiates any number of times in both modes, batches and shards.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


def own_derivative(
    forward: Callable[..., tuple[Any, Any]], pull_back: Callable[[Any, Any], tuple], *fixed: Any
) -> Callable[..., Any]:
    """f(*args) = forward(*fixed, *args)[0], with gradients by args that are computed by `pull_back`.

    `forward`, float arrays -> (y, residuals), is differentiable in both modes; forward mode and higher
    derivatives go through it. `pull_back` is (residuals, y_bar) -> a gradient for each of args. All arrays
    that they read are in `fixed` or args: what a derivative closes over is of another trace inside `jax.jit`.
    """

    @jax.custom_jvp
    def f(fixed: tuple, *args: Any) -> Any:
        return forward(*fixed, *args)[0]

    @f.defjvp
    def jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
        fixed, args, args_dot = primals[0], primals[1:], tangents[1:]
        y, residuals = forward(*fixed, *args)

        def push_forward(args: tuple, args_dot: tuple) -> Any:
            return jax.jvp(lambda *args: forward(*fixed, *args)[0], args, args_dot)[1]

        return y, linear_map(push_forward, partial(pull_back, residuals), args, args_dot)

    def called(*args: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.auto_axes and not mesh.manual_axes:
            # Under `jit` on a mesh an argument may be a gathered parameter: `jax.checkpoint` knows it by its
            # name, and gathers it again for the backward pass. With the 0 below it would be stored instead.
            return f(fixed, *args)
        # Under shard_map some arguments may vary over devices and others not; with the 0, all of them vary.
        return f(fixed, *_plus(args, _nothing(args)))

    return called


def linear_map(f: Callable[[Any, Tree], Any], transpose: Callable[[Any], Tree], params: Any, x: Tree) -> Any:
    """f(params, x), linear in x, with `transpose` in place of JAX's own transpose of f.

    With A = [[1, 0], [-f, 1]], the solution of A (x', y) = (x, 0) is x' = x and y = f(x); the solution of
    the transposed equation A^T (x', y) = (0, y_bar) has x' = transpose(y_bar).
    """

    def matvec(params: Any, pair: tuple) -> tuple:
        x, y = pair
        return x, jax.tree.map(jnp.subtract, y, f(params, x))

    def solve(pair: tuple) -> tuple:
        x, y = pair
        return x, jax.tree.map(jnp.add, y, f(params, x))

    def transpose_solve(pair: tuple) -> tuple:
        x, y = pair
        return jax.tree.map(jnp.add, x, transpose(y)), y

    zeros = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(f, params, x))
    return linear_solve(matvec, solve, transpose_solve, params, (x, zeros))[1]


def linear_solve(
    matvec: Callable[[Any, Tree], Tree],
    solve: Callable[[Tree], Tree],
    transpose_solve: Callable[[Tree], Tree],
    params: Any,
    b: Tree,
) -> Tree:
    """The solution x of matvec(params, x) = b, by `jax.lax.custom_linear_solve`, for x of several arrays.

    `matvec` is linear in x, on float arrays; JAX differentiates it for all but the first gradient. `solve` is
    b -> x, given the parameters, and `transpose_solve` solves the transposed equation.

    `custom_linear_solve` can be transposed only if all arrays of b have a tangent, or none has. So a 0 that
    is computed from all of b and the parameters (`_nothing`) is added to each array of b; XLA drops the 0.

    The given functions are called through `jax.jit`, which keeps their NumPy constants inside. As arguments
    of the solve, constants would be cast to device-varying twice under `jax.shard_map`, which is an error.
    """

    def tied_matvec(x: Tree) -> Tree:
        return _plus(jax.jit(matvec)(params, x), _nothing(x) * _nothing(params))

    x = jax.lax.custom_linear_solve(
        tied_matvec,
        _plus(b, _nothing((params, b))),
        lambda _, b: jax.jit(solve)(b),
        lambda _, x_bar: jax.jit(transpose_solve)(x_bar),
    )
    return _plus(x, _nothing(x))


def tied(tree: Tree, other: Any) -> Tree:
    """`tree` as it is, but under `jax.shard_map` it varies over the devices as the arrays of `other` do."""
    return _plus(tree, _nothing(other))


def _nothing(tree: Any) -> jax.Array:
    """0, as a sum over no entry of any leaf."""
    return sum(
        jax.lax.slice_in_dim(leaf.reshape(-1), 0, 0).sum().astype(jnp.float32)
        for leaf in jax.tree.leaves(tree)
    )


def _plus(tree: Tree, scalar: jax.Array) -> Tree:
    return jax.tree.map(lambda leaf: leaf + scalar.astype(leaf.dtype), tree)


def sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums x over the axes along which an array of `shape` was broadcast to the shape of x."""
    aligned = (1,) * (x.ndim - len(shape)) + tuple(shape)
    # Axes of size 1 are summed too: XLA for CPUs sums [C, 1, L] over both ten times faster than over L alone.
    axes = tuple(i for i, size in enumerate(aligned) if size == 1)
    return x.sum(axes, keepdims=True).reshape(shape)


def sum_products(products: jax.Array, axis: int) -> jax.Array:
    """Sums products over one axis other than the last, by a matrix product with ones.

    XLA for CPUs would fuse the products into a sum; where a kept axis has size 1, that takes up to forty
    times as long as a matrix product.
    """
    ones = jnp.ones(products.shape[axis], products.dtype)
    return jnp.tensordot(ones, products, (0, axis), precision="highest")
