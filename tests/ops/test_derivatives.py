import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from jax.sharding import AxisType, PartitionSpec

from hyena_jax.ops.fast.derivatives import linear_map, linear_solve, own_derivative

X, KERNEL = (np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate([(7, 3), (3, 5)]))


def forward(x, kernel):
    return jnp.tanh(x) @ kernel, (x, kernel)


def pull_back(residuals, y_bar):
    x, kernel = residuals
    return (y_bar @ kernel.T) * (1 - jnp.tanh(x) ** 2), jnp.tanh(x).T @ y_bar


@pytest.mark.wide
def test_a_function_with_its_own_derivative_has_all_modes():
    with jax.enable_x64(True):
        check_modes(lambda args: own_derivative(forward, pull_back)(*args), (X, KERNEL), is_thorough=True)


@pytest.mark.grid
@pytest.mark.parametrize("argument", [0, 1])
def test_one_argument_alone_may_be_differentiated(argument):
    def f(moved):
        args = [jnp.asarray(X), jnp.asarray(KERNEL)]
        args[argument] = moved
        return own_derivative(forward, pull_back)(*args)

    with jax.enable_x64(True):
        check_modes(f, (X, KERNEL)[argument], is_thorough=True)


@pytest.mark.grid
def test_inside_shard_map_with_constants_and_an_argument_that_all_devices_share():
    scale = np.linspace(1, 2, KERNEL.shape[1])

    def scaled_forward(x, kernel):
        y, residuals = forward(x, kernel)
        return y * scale, residuals

    def gradients(x, kernel):
        f = own_derivative(scaled_forward, lambda residuals, y_bar: pull_back(residuals, y_bar * scale))
        return jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1))(x, kernel)

    rows, shared = PartitionSpec("rows"), PartitionSpec()
    mesh = jax.make_mesh((2,), ("rows",), (AxisType.Auto,))
    with jax.enable_x64(True):
        sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(rows, shared), out_specs=(rows, shared))
        for found, expected in zip(jax.jit(sharded)(X[:6], KERNEL), gradients(X[:6], KERNEL), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.grid
def test_a_linear_map_of_a_tree_has_all_modes_also_by_what_it_is_made_of():
    def f(args):
        x, kernel = args
        return linear_map(
            lambda kernel, pair: {"y": pair[0] @ kernel, "z": pair[1] @ kernel},
            lambda bars: (bars["y"] @ kernel.T, bars["z"] @ kernel.T),
            kernel,
            (x, x[:2] ** 2),
        )

    with jax.enable_x64(True):
        check_modes(f, (X, KERNEL), is_thorough=True)


def test_the_solution_of_an_equation_keeps_infinities_and_dtypes_apart():
    b = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([jnp.inf, jnp.nan]), "c": jnp.bfloat16(3)}
    x = linear_solve(lambda _, x: x, lambda b: b, lambda x_bar: x_bar, jnp.array(jnp.nan), b)
    for name in b:
        assert x[name].dtype == b[name].dtype
        np.testing.assert_array_equal(np.float32(x[name]), np.float32(b[name]))


def test_the_compiled_backward_pass_is_that_of_the_rule_alone():
    """Nothing of the linear solve remains: three products, no second tangent, no empty sums."""

    def loss(x, kernel):
        return (own_derivative(forward, pull_back)(x, kernel) ** 2).sum()

    program = jax.jit(jax.grad(loss, (0, 1))).lower(jnp.asarray(X), jnp.asarray(KERNEL)).compile().as_text()
    assert program.count(" dot(") == 3
    assert "[0]" not in program
