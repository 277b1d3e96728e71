"""Products with a parameter matrix, which choose the order of axes in the forward and backward pass.

Axes: B batch, L length, D channels in, C channels out, N rows.

The gradient with respect to a matrix needs one of its two factors transposed. XLA for CPUs fuses the
computation of that factor into the transposing copy, which then runs over memory in the wrong order, several
times slower than the product itself. So each function here transposes the factor that is cheap to compute,
and says which. What this does on a GPU or a TPU was not measured.
"""

import jax
import jax.numpy as jnp

from hyena_jax.ops.fast.derivatives import own_derivative

# The arguments x and kernel of a product, which its gradients need.
Factors = tuple[jax.Array, jax.Array]


def dense_dot_general(x: jax.Array, kernel: jax.Array, *_: object, **__: object) -> jax.Array:
    """x [..., D] kernel [D, C] -> [..., C], for an output whose gradient is expensive to compute.

    The kernel's gradient transposes the input; JAX's own rule, right before a residual sum, transposes the
    output's gradient. It is a `dot_general` of `nn.Dense`, whose further arguments name these axes.
    """
    return own_derivative(lambda x, kernel: (x @ kernel, (x, kernel)), _dense_pull_back)(x, kernel)


def _dense_pull_back(factors: Factors, y_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = factors
    rows = x.reshape(-1, x.shape[-1]), y_bar.reshape(-1, y_bar.shape[-1])
    return y_bar @ kernel.T, jnp.einsum("nd,nc->dc", *rows)


def split_dense(x: jax.Array, kernel: jax.Array, n_parts: int) -> tuple[jax.Array, ...]:
    """x [..., D] kernel [D, C] -> n_parts arrays [..., C / n_parts], each from its own product.

    Gradients as in `dense_dot_general`. Splitting one large product costs a copy, and its gradient more;
    concatenating the parts' gradients for one product costs little. For a single row, such as a token that is
    decoded, splitting costs nothing, while XLA for CPUs would fuse the slice of the kernel into the product,
    which then reads it out of order.
    """

    def forward(x: jax.Array, kernel: jax.Array) -> tuple[tuple[jax.Array, ...], Factors]:
        if x.size == x.shape[-1]:
            return tuple(jnp.split(x @ kernel, n_parts, axis=-1)), (x, kernel)
        return tuple(x @ part for part in jnp.split(kernel, n_parts, axis=1)), (x, kernel)

    def pull_back(factors: Factors, y_bars: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        return _dense_pull_back(factors, jnp.concatenate(y_bars, axis=-1))

    return own_derivative(forward, pull_back)(x, kernel)


def block_dense(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [H, N, I] kernel [H, I, J] -> [H, N, J], a product for each of H blocks.

    Gradients as in `dense_dot_general`. A single row of a single block is multiplied twice: XLA for CPUs
    would fuse the kernel's reshape into the product of one row, which then reads it out of order.
    """

    def forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Factors]:
        rows = jnp.concatenate([x, x], axis=1) if x.shape[:2] == (1, 1) else x
        return jnp.einsum("hni,hij->hnj", rows, kernel)[:, : x.shape[1]], (x, kernel)

    def pull_back(factors: Factors, y_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, kernel = factors
        return jnp.einsum("hnj,hij->hni", y_bar, kernel), jnp.einsum("hni,hnj->hij", x, y_bar)

    return own_derivative(forward, pull_back)(x, kernel)


def to_channels_first(x: jax.Array, kernel: jax.Array, n_parts: int = 1) -> tuple[jax.Array, ...]:
    """x [B, L, D] kernel [D, C] -> n_parts of [C / n_parts, B, L]: only x and its gradient are transposed."""

    def forward(x: jax.Array, kernel: jax.Array) -> tuple[tuple[jax.Array, ...], Factors]:
        columns, parts = x.transpose(2, 0, 1), jnp.split(kernel, n_parts, axis=1)
        return tuple(jnp.einsum("dc,dbl->cbl", part, columns) for part in parts), (x, kernel)

    def pull_back(factors: Factors, y_bars: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, kernel = factors
        y_bar = jnp.concatenate(y_bars)
        x_bar = jnp.einsum("dc,cbl->dbl", kernel, y_bar).transpose(1, 2, 0)
        return x_bar, jnp.einsum("cbl,bld->cd", y_bar, x).T

    return own_derivative(forward, pull_back)(x, kernel)


def from_channels_first(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [D, B, L] kernel [D, C] -> [B, L, C]: only the output and its gradient are transposed."""

    def forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Factors]:
        return jnp.einsum("dc,dbl->cbl", kernel, x).transpose(1, 2, 0), (x, kernel)

    def pull_back(factors: Factors, y_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, kernel = factors
        x_bar = jnp.einsum("dc,cbl->dbl", kernel, y_bar.transpose(2, 0, 1))
        return x_bar, jnp.einsum("dbl,blc->dc", x, y_bar)

    return own_derivative(forward, pull_back)(x, kernel)
