import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

from hyena_jax.ops.fast.dense import (
    block_dense,
    dense_dot_general,
    from_channels_first,
    split_dense,
    to_channels_first,
)


def split_and_joined(x, kernel):
    return jnp.concatenate(split_dense(x, kernel, 3), -1)


def channels_first_and_joined(x, kernel):
    return jnp.concatenate(to_channels_first(x, kernel, 3))


# Each function with the equivalent einsum and the shapes of its arguments.
PRODUCTS = {
    "block_dense": (block_dense, "hni,hij->hnj", (2, 7, 3), (2, 3, 5)),
    "block_dense_of_a_row": (block_dense, "hni,hij->hnj", (1, 1, 3), (1, 3, 5)),
    "dense_dot_general": (dense_dot_general, "bld,dc->blc", (2, 7, 3), (3, 5)),
    "split_dense": (split_and_joined, "bld,dc->blc", (2, 7, 3), (3, 6)),
    "split_dense_of_a_row": (split_and_joined, "bld,dc->blc", (1, 1, 3), (3, 6)),
    "to_channels_first": (channels_first_and_joined, "bld,dc->cbl", (2, 7, 3), (3, 6)),
    "from_channels_first": (from_channels_first, "dbl,dc->blc", (3, 2, 7), (3, 5)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_equals_its_einsum_in_value_and_gradients(name):
    product, equation, *shapes = PRODUCTS[name]
    x_axes, kernel_axes, y_axes = re.split(",|->", equation)
    rng = np.random.default_rng(0)
    x, kernel = (rng.standard_normal(shape) for shape in shapes)
    y = np.einsum(equation, x, kernel)
    weight = rng.standard_normal(y.shape)
    with jax.enable_x64(True):

        @jax.jit
        def results(*args):
            y, pull_back = jax.vjp(product, *args)
            return y, *pull_back(weight)

        found = results(x, kernel)
    assert_close(found[0], y)
    assert_close(found[1], np.einsum(f"{y_axes},{kernel_axes}->{x_axes}", weight, kernel))
    assert_close(found[2], np.einsum(f"{x_axes},{y_axes}->{kernel_axes}", x, weight))


@pytest.mark.parametrize("name", PRODUCTS)
def test_bfloat16_stays(name):
    product, _, *shapes = PRODUCTS[name]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def results(*args):
        y, pull_back = jax.vjp(product, *args)
        return y, *pull_back(y)

    assert {x.dtype for x in jax.eval_shape(results, *args)} == {jnp.dtype(jnp.bfloat16)}
