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

compiled = jax.jit(rg_lru)


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
    h, last = compiled(*map(np.float32, args), starts=starts if has_starts else None)
    assert_close(h, expected)
    assert_close(last, expected[:, -1])


def test_gradients_equal_central_differences_of_the_definition():
    with jax.enable_x64(True):
        args = arrays(7)
        rng = np.random.default_rng(0)
        starts, weight = rng.random((2, 7)) < 0.3, rng.standard_normal((2, 7, 3))

        def loss(*args):
            return (weight * rg_lru(*args, starts=jnp.asarray(starts))[0]).sum()

        for i, gradient in enumerate(jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*args)):
            direction = rng.standard_normal(args[i].shape)
            moved = [
                (weight * recurrence.rg_lru(*args[:i], args[i] + s * direction, *args[i + 1 :], starts)).sum()
                for s in (1e-6, -1e-6)
            ]
            expected = (moved[0] - moved[1]) / 2e-6
            assert np.sum(gradient * direction) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_what_came_before_a_start_does_not_matter():
    x, r, i, rate = map(np.float32, arrays(7))
    starts = np.zeros((2, 7), bool)
    starts[:, 4] = True
    h = np.asarray(compiled(x, r, i, rate, np.ones((2, 3), np.float32), starts)[0])
    np.testing.assert_array_equal(h[:, 4], (i * x)[:, 4])
    x[:, :4] = 1e30
    other = np.asarray(compiled(x, r, i, rate, np.zeros((2, 3), np.float32), starts)[0])
    np.testing.assert_array_equal(other[:, 4:], h[:, 4:])


@jax.jit
def value_and_gradients(*args):
    def loss(*args):
        h, last = rg_lru(*args)
        return h.sum() + last.sum(), h

    return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*args)


@settings(max_examples=30, deadline=None)
@given(
    st.one_of(st.floats(-120, -12), st.floats(3, 120), st.floats(1e4, 1e30), st.just(-1e30)),
    st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 1.0]),
)
def test_is_finite_where_a_is_almost_0_or_1(rate, r):
    """1 - a is below 1e-7 if 8 r softplus(rate) is; a is near 1e-7 if it is 16, and smaller beyond."""
    x = np.float32(arrays(17)[0])
    args = (x, np.full_like(x, r), np.full_like(x, 0.5), np.full(3, rate, np.float32))
    (_, h), gradients = value_and_gradients(*args)
    assert np.isfinite(h).all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("distance", [1e-7, 1e-12, 1e-20])
def test_the_input_is_scaled_exactly_where_a_is_almost_1(distance):
    """In float32 the direct formula 1 - a^2 would be 0, or wrong by tens of percent."""
    one = np.ones((1, 1, 1), np.float32)
    rate = np.log(np.expm1(np.full(1, distance / 8))).astype(np.float32)
    h, _ = compiled(one, one, one, rate)
    np.testing.assert_allclose(h, np.sqrt(-np.expm1(-2 * distance)), rtol=1e-5)


def test_the_derivative_of_the_square_root_is_bounded():
    z = np.float32([0.0, 1e-30, 1 / (2 * MAX_SQRT_DERIVATIVE) ** 2, 1e-4, 0.25, 1.0])
    roots, derivatives = jax.jit(jax.vmap(jax.value_and_grad(bounded_sqrt)))(z)
    np.testing.assert_array_equal(roots, jax.jit(jnp.sqrt)(z))
    np.testing.assert_allclose(derivatives, [1e3, 1e3, 1e3, 50, 1, 0.5], rtol=1e-6)


def test_bfloat16_input_is_summed_in_float32():
    x, r, i, rate = arrays(127)
    h, last = compiled(*(v.astype(jnp.bfloat16) for v in (x, r, i)), np.float32(rate))
    assert h.dtype == jnp.bfloat16
    assert last.dtype == jnp.float32
    assert_close(h, recurrence.rg_lru(x, r, i, rate, np.zeros((2, 127), bool)))
