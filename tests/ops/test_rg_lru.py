import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import in_grid
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close

from hyena_jax.ops.rg_lru import MAX_SQRT_DERIVATIVE, bounded_sqrt, rg_lru
from hyena_jax.reference import recurrence


def arrays(length: int):
    """x, the gates r and i, and the rate, float64."""
    rng = np.random.default_rng(length)
    x, r, i = rng.standard_normal((3, 2, length, 3))
    return x, 1 / (1 + np.exp(-r)), 1 / (1 + np.exp(-i)), rng.standard_normal(3)


@pytest.mark.parametrize("has_starts", [False, True])
@pytest.mark.parametrize("length", [127, *in_grid(1, 7, 64)])
def test_equals_the_definition(length, has_starts):
    args = arrays(length)
    starts = np.random.default_rng(0).random((2, length)) < 0.2 * has_starts
    expected = recurrence.rg_lru(*args, starts)
    h, last = rg_lru(*map(jnp.float32, args), starts=jnp.asarray(starts) if has_starts else None)
    assert_close(h, expected)
    assert_close(last, expected[:, -1])


def test_gradients_equal_central_differences_of_the_definition():
    with jax.enable_x64(True):
        args = arrays(7)
        rng = np.random.default_rng(0)
        starts, weight = rng.random((2, 7)) < 0.3, rng.standard_normal((2, 7, 3))

        def loss(*args):
            return (weight * rg_lru(*args, starts=jnp.asarray(starts))[0]).sum()

        for i, gradient in enumerate(jax.grad(loss, (0, 1, 2, 3))(*map(jnp.asarray, args))):
            direction = rng.standard_normal(args[i].shape)
            moved = [
                (weight * recurrence.rg_lru(*args[:i], args[i] + s * direction, *args[i + 1 :], starts)).sum()
                for s in (1e-6, -1e-6)
            ]
            expected = (moved[0] - moved[1]) / 2e-6
            assert np.sum(gradient * direction) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_what_came_before_a_start_does_not_matter():
    x, r, i, rate = map(jnp.float32, arrays(7))
    starts = jnp.zeros((2, 7), bool).at[:, 4].set(True)
    h, _ = rg_lru(x, r, i, rate, jnp.ones((2, 3)), starts)
    np.testing.assert_array_equal(h[:, 4], (i * x)[:, 4])
    other, _ = rg_lru(x.at[:, :4].set(1e30), r, i, rate, jnp.zeros((2, 3)), starts)
    np.testing.assert_array_equal(other[:, 4:], h[:, 4:])


@settings(max_examples=30, deadline=None)
@given(
    st.one_of(st.floats(-120, -12), st.floats(3, 120), st.floats(1e4, 1e30), st.just(-1e30)),
    st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 1.0]),
)
def test_is_finite_where_a_is_almost_0_or_1(rate, r):
    """1 - a is below 1e-7 if 8 r softplus(rate) is; a is near 1e-7 if it is 16, and smaller beyond."""
    x = jnp.float32(arrays(17)[0])

    def loss(x, r, i, rate):
        h, last = rg_lru(x, r, i, rate)
        return h.sum() + last.sum(), h

    args = (x, jnp.full_like(x, r), jnp.full_like(x, 0.5), jnp.full(3, rate, jnp.float32))
    (_, h), gradients = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*args)
    assert np.isfinite(h).all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("distance", [1e-7, 1e-12, 1e-20])
def test_the_input_is_scaled_exactly_where_a_is_almost_1(distance):
    """In float32 the direct formula 1 - a^2 would be 0, or wrong by tens of percent."""
    one = jnp.ones((1, 1, 1))
    rate = jnp.log(jnp.expm1(jnp.full(1, distance / 8)))
    h, _ = rg_lru(one, one, one, rate)
    np.testing.assert_allclose(h, np.sqrt(-np.expm1(-2 * distance)), rtol=1e-5)


def test_the_derivative_of_the_square_root_is_bounded():
    z = jnp.array([0.0, 1e-30, 1 / (2 * MAX_SQRT_DERIVATIVE) ** 2, 1e-4, 0.25, 1.0])
    np.testing.assert_array_equal(bounded_sqrt(z), jnp.sqrt(z))
    np.testing.assert_allclose(jax.vmap(jax.grad(bounded_sqrt))(z), [1e3, 1e3, 1e3, 50, 1, 0.5], rtol=1e-6)


def test_bfloat16_input_is_summed_in_float32():
    x, r, i, rate = arrays(127)
    h, last = rg_lru(*(jnp.asarray(v, jnp.bfloat16) for v in (x, r, i)), jnp.float32(rate))
    assert h.dtype == jnp.bfloat16
    assert last.dtype == jnp.float32
    assert_close(h, recurrence.rg_lru(x, r, i, rate, np.zeros((2, 127), bool)))
