import jax
import jax.numpy as jnp
import numpy as np
import pytest
from differences import assert_equal_differences
from grid import in_grid
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close

from hyena_jax.ops.linear_recurrence import linear_recurrence
from hyena_jax.ops.rg_lru import MAX_SQRT_DERIVATIVE, bounded_sqrt, factors
from hyena_jax.reference import recurrence


def rg_lru(x, r, i, rate, h0=None, starts=None, s=None, shifted=False):
    """The RG-LRU of its coefficients, as the mixer Hawk computes it."""
    dtype = jnp.float64 if x.dtype == np.float64 else jnp.float32
    wide, r, i, rate = (jnp.asarray(v, dtype) for v in (x, r, i, rate))
    a, rest = factors(r, rate, s, shifted)
    scale = bounded_sqrt(rest)
    if starts is not None:
        a, scale = (jnp.where(starts[..., None], at_start, v) for at_start, v in ((0, a), (1, scale)))
    h, last = linear_recurrence(a, scale * (i * wide), h0)
    return h.astype(x.dtype), last


compiled = jax.jit(rg_lru, static_argnames="shifted")


def arrays(length: int):
    """x, the gates r and i, and the rate, float64."""
    rng = np.random.default_rng(length)
    x, r, i = rng.standard_normal((3, 2, length, 3))
    return x, 1 / (1 + np.exp(-r)), 1 / (1 + np.exp(-i)), rng.standard_normal(3)


@pytest.mark.parametrize("length", [127, *in_grid(1, 7, 64)])
@pytest.mark.parametrize(
    ("has_starts", "shifted", "has_s"),
    [
        (False, False, False),
        (True, True, False),
        (True, False, True),
        *(pytest.param(True, same, same, marks=pytest.mark.grid) for same in (False, True)),
    ],
)
def test_equals_the_definition(length, has_starts, shifted, has_s):
    args, rng = arrays(length), np.random.default_rng(0)
    starts = rng.random((2, length)) < 0.2 * has_starts
    s = np.tanh(rng.standard_normal((2, length, 3))) if has_s else None
    expected = recurrence.rg_lru(*args, starts, 1.0 if s is None else s, shifted)
    h, last = compiled(
        *map(np.float32, args),
        starts=starts if has_starts else None,
        s=None if s is None else np.float32(s),
        shifted=shifted,
    )
    assert_close(h, expected)
    assert_close(last, expected[:, -1])


@pytest.mark.parametrize("shifted", [False, True])
def test_gradients_equal_central_differences_of_the_definition(shifted):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        starts, weight = rng.random((2, 7)) < 0.3, rng.standard_normal((2, 7, 3))
        args = (*arrays(7), np.tanh(rng.standard_normal((2, 7, 3))))

        def loss(*args):
            return (weight * rg_lru(*args[:4], None, jnp.asarray(starts), args[4], shifted)[0]).sum()

        def oracle(*args):
            return (weight * recurrence.rg_lru(*args[:4], starts, args[4], shifted)).sum()

        assert_equal_differences(jax.jit(jax.grad(loss, range(5)))(*args), oracle, args)


@jax.jit
def values_and_gradients(args, s):
    """Plain, shifted, and with s."""

    def loss(args, s, shifted):
        h, last = rg_lru(*args, s=s, shifted=shifted)
        return h.sum() + last.sum(), h

    run = jax.value_and_grad(loss, (0, 1), has_aux=True)
    return [run(args, *options) for options in ((None, False), (None, True), (s, False))]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.one_of(st.floats(-120, -12), st.floats(3, 120), st.floats(1e4, 1e30), st.just(-1e30)),
    st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 1.0]),
)
def test_is_finite_where_a_is_almost_0_or_1(rate, r):
    """1 - a is below 1e-7 if 8 r softplus(rate) is; a is near 1e-7 if it is 16, and smaller beyond."""
    x = np.float32(arrays(17)[0])
    args = (x, np.full_like(x, r), np.full_like(x, 0.5), np.full(3, rate, np.float32))
    s = np.broadcast_to(np.float32([-1, 0, 1]), x.shape)
    assert all(np.isfinite(found).all() for found in jax.tree.leaves(values_and_gradients(args, s)))


@pytest.mark.parametrize(
    ("shifted", "distance"),
    [
        *((False, distance) for distance in (1e-7, 1e-12, 1e-20)),
        *((True, d) for d in (1e-20, 1e-7, 20.0, 60.0)),
    ],
)
def test_the_input_is_scaled_exactly_where_a_factor_is_almost_1_or_minus_1(shifted, distance):
    """In float32 sqrt(1 - a^2) would be 0, or wrong by tens of percent; a shifted factor is 2 a - 1."""
    one = np.ones((1, 1, 1), np.float32)
    rate = np.log(np.expm1(np.full(1, distance / 8))).astype(np.float32)
    h, _ = compiled(one, one, one, rate, shifted=shifted)
    rest = 4 * np.exp(-distance) * -np.expm1(-distance) if shifted else -np.expm1(-2 * distance)
    np.testing.assert_allclose(h, np.sqrt(rest), rtol=1e-4 if shifted else 1e-5)


def test_the_derivative_of_the_square_root_is_bounded():
    z = np.float32([0.0, 1e-30, 1 / (2 * MAX_SQRT_DERIVATIVE) ** 2, 1e-4, 0.25, 1.0])
    roots, derivatives = jax.jit(jax.vmap(jax.value_and_grad(bounded_sqrt)))(z)
    np.testing.assert_array_equal(roots, jax.jit(jnp.sqrt)(z))
    np.testing.assert_allclose(derivatives, [1e3, 1e3, 1e3, 50, 1, 0.5], rtol=1e-6)


def test_second_derivatives_are_finite_where_a_gate_is_0():
    x, r = np.ones((1, 3, 2), np.float32), np.float32([0, 0.3, 0]).reshape(1, 3, 1) * np.ones(2, np.float32)

    @jax.jit
    def curvature(r):
        def loss(r):
            return jnp.square(rg_lru(x, r, x / 2, np.zeros(2, np.float32))[0]).sum()

        return jax.grad(lambda r: jnp.square(jax.grad(loss)(r)).sum())(r)

    assert np.isfinite(curvature(r)).all()
