import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from tolerances import assert_close

from hyena_jax.ops.dense import (
    block_dense,
    dense,
    dense_dot_general,
    from_channels_first,
    split_dense,
    to_channels_first,
)

# Each function with the equivalent einsum and the shapes of its arguments.
PRODUCTS = {
    "dense": (dense, "bld,dc->blc", (2, 7, 3), (3, 5)),
    "block_dense": (block_dense, "hni,hij->hnj", (2, 7, 3), (2, 3, 5)),
    "dense_dot_general": (dense_dot_general, "bld,dc->blc", (2, 7, 3), (3, 5)),
    "split_dense": (lambda *a: jnp.concatenate(split_dense(*a, 3), -1), "bld,dc->blc", (2, 7, 3), (3, 6)),
    "to_channels_first": (
        lambda *a: jnp.concatenate(to_channels_first(*a, 3)),
        "bld,dc->cbl",
        (2, 7, 3),
        (3, 6),
    ),
    "from_channels_first": (from_channels_first, "dbl,dc->blc", (3, 2, 7), (3, 5)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_equals_its_einsum_in_value_and_gradients(name):
    product, equation, *shapes = PRODUCTS[name]
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        args = [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]
        y, pull_back = jax.vjp(product, *args)
        expected, expected_pull_back = jax.vjp(lambda x, kernel: jnp.einsum(equation, x, kernel), *args)
        assert_close(y, expected)
        y_bar = jnp.asarray(rng.standard_normal(y.shape))
        for ours, theirs in zip(pull_back(y_bar), expected_pull_back(y_bar), strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize("name", PRODUCTS)
def test_derivatives_in_both_modes(name):
    product, _, *shapes = PRODUCTS[name]
    with jax.enable_x64(True):
        args = tuple(np.random.default_rng(0).standard_normal(shape) for shape in shapes)
        check_modes(lambda args: product(*args), args, is_thorough=True)


@pytest.mark.parametrize("name", PRODUCTS)
def test_bfloat16_stays(name):
    product, _, *shapes = PRODUCTS[name]
    args = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
    y, pull_back = jax.vjp(product, *args)
    assert {y.dtype, *(bar.dtype for bar in pull_back(y))} == {jnp.dtype(jnp.bfloat16)}
