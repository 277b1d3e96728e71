"""Products with a matrix of parameters, with the order of axes chosen in forward and backward pass.

Axes: B batch, L length, D channels in, C channels out, N rows.

The derivative by a matrix needs one of its two factors transposed. XLA for CPUs moves what computed that
factor into the transposing copy, which then runs over memory in the wrong order: several times slower than
the product itself. So each function here transposes the factor that is cheap to compute, and says which.
On accelerators, whose libraries read either order, nothing is lost.
"""

from functools import partial

import jax
import jax.numpy as jnp


@jax.custom_vjp
def dense(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., D] kernel [D, C] -> [..., C], for an output that much is computed from.

    Its derivative transposes the input; JAX's own, the right one before a residual sum, the derivative
    by the output.
    """
    return x @ kernel


def _dense_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return dense(x, kernel), (x, kernel)


def _dense_backward(residuals: tuple[jax.Array, jax.Array], y_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    rows = x.reshape(-1, x.shape[-1]), y_bar.reshape(-1, y_bar.shape[-1])
    return y_bar @ kernel.T, jnp.einsum("nd,nc->dc", *rows)


dense.defvjp(_dense_forward, _dense_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def split_dense(x: jax.Array, kernel: jax.Array, n_parts: int) -> tuple[jax.Array, ...]:
    """`dense` cut into equal parts of its columns, each a product of its own: n_parts of [..., C / n_parts].

    To cut one large product up costs a copy, and the derivative of that more; to put the parts' derivatives
    together for one product costs little.
    """
    return tuple(x @ part for part in jnp.split(kernel, n_parts, axis=1))


def _split_forward(
    x: jax.Array, kernel: jax.Array, n_parts: int
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array]]:
    return split_dense(x, kernel, n_parts), (x, kernel)


def _split_backward(
    n_parts: int, residuals: tuple[jax.Array, jax.Array], y_bars: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    return _dense_backward(residuals, jnp.concatenate(y_bars, axis=-1))


split_dense.defvjp(_split_forward, _split_backward)


@jax.custom_vjp
def block_dense(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [H, N, I] kernel [H, I, J] -> [H, N, J], a product for each block H; derivative as in `dense`."""
    return jnp.einsum("hni,hij->hnj", x, kernel)


def _block_dense_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return block_dense(x, kernel), (x, kernel)


def _block_dense_backward(
    residuals: tuple[jax.Array, jax.Array], y_bar: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    return jnp.einsum("hnj,hij->hni", y_bar, kernel), jnp.einsum("hni,hnj->hij", x, y_bar)


block_dense.defvjp(_block_dense_forward, _block_dense_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def to_channels_first(x: jax.Array, kernel: jax.Array, n_parts: int = 1) -> tuple[jax.Array, ...]:
    """x [B, L, D] kernel [D, C] -> n_parts of [C / n_parts, B, L], in parts as `split_dense`.

    Only x and its derivative are transposed.
    """
    columns = x.transpose(2, 0, 1)
    return tuple(jnp.einsum("dc,dbl->cbl", part, columns) for part in jnp.split(kernel, n_parts, axis=1))


def _to_forward(
    x: jax.Array, kernel: jax.Array, n_parts: int
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array]]:
    return to_channels_first(x, kernel, n_parts), (x, kernel)


def _to_backward(
    n_parts: int, residuals: tuple[jax.Array, jax.Array], y_bars: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    y_bar = jnp.concatenate(y_bars)
    x_bar = jnp.einsum("dc,cbl->dbl", kernel, y_bar).transpose(1, 2, 0)
    return x_bar, jnp.einsum("cbl,bld->cd", y_bar, x).T


to_channels_first.defvjp(_to_forward, _to_backward)


@jax.custom_vjp
def from_channels_first(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [D, B, L] kernel [D, C] -> [B, L, C]: only the output and its derivative are transposed."""
    return jnp.einsum("dc,dbl->cbl", kernel, x).transpose(1, 2, 0)


def _from_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return from_channels_first(x, kernel), (x, kernel)


def _from_backward(residuals: tuple[jax.Array, jax.Array], y_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    x_bar = jnp.einsum("dc,cbl->dbl", kernel, y_bar.transpose(2, 0, 1))
    return x_bar, jnp.einsum("dbl,blc->dc", x, y_bar)


from_channels_first.defvjp(_from_forward, _from_backward)


def dense_dot_general(x: jax.Array, kernel: jax.Array, *_: object, **__: object) -> jax.Array:
    """`dense` in the place of the `dot_general` of `nn.Dense`, whose axes are those of `dense`."""
    return dense(x, kernel)
