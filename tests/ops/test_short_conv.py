import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

from hyena_jax.ops.short_conv import advance_history, empty_history, short_conv
from hyena_jax.reference import convolution


def arrays(length: int, n_taps: int, dtype=np.float32):
    rng = np.random.default_rng(length)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in ((2, 3, length), (3, n_taps), (3,)))


@pytest.mark.parametrize("n_taps", [1, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 7, 64, 127])
def test_equals_the_definition(length, n_taps):
    x, taps, bias = arrays(length, n_taps)
    y = short_conv(jnp.asarray(x), taps, bias, empty_history(2, 3, n_taps))
    assert_close(y, convolution.short_conv(x, taps, bias))


@pytest.mark.parametrize("split", range(8))
def test_in_two_parts_equals_whole(split):
    x, taps, bias = map(jnp.asarray, arrays(7, 4))
    start = empty_history(2, 3, 4)
    first = short_conv(x[..., :split], taps, bias, start)
    second = short_conv(x[..., split:], taps, bias, advance_history(start, x[..., :split]))
    np.testing.assert_array_equal(jnp.concatenate([first, second], axis=-1), short_conv(x, taps, bias, start))


def test_gradients_equal_central_differences_of_the_definition():
    with jax.enable_x64(True):
        args = arrays(7, 3, np.float64)
        rng = np.random.default_rng(0)
        weight = rng.standard_normal(args[0].shape)
        grads = jax.grad(
            lambda x, taps, bias: (weight * short_conv(x, taps, bias, empty_history(2, 3, 3, x.dtype))).sum(),
            argnums=(0, 1, 2),
        )(*map(jnp.asarray, args))
        for i, grad in enumerate(grads):
            direction = rng.standard_normal(args[i].shape)
            moved = [
                (
                    weight * convolution.short_conv(*args[:i], args[i] + s * 1e-6 * direction, *args[i + 1 :])
                ).sum()
                for s in (1, -1)
            ]
            assert np.sum(grad * direction) == pytest.approx((moved[0] - moved[1]) / 2e-6, rel=1e-6, abs=1e-6)


def test_future_inputs_have_exactly_no_gradient():
    x, taps, bias = map(jnp.asarray, arrays(7, 3))
    gradient = jax.grad(lambda x: short_conv(x, taps, bias, empty_history(2, 3, 3))[..., 3].sum())(x)
    assert np.all(np.asarray(gradient)[..., 4:] == 0)


@pytest.mark.parametrize("n_taps", [1, 3, 4])
def test_documents_equal_the_definition(n_taps):
    x, taps, bias = arrays(31, n_taps)
    ids = np.repeat([[0, 1, 2, 3], [5, 4, -1, 0]], [5, 1, 17, 8], axis=1)
    y = short_conv(jnp.asarray(x), taps, bias, empty_history(2, 3, n_taps), jnp.asarray(ids))
    assert_close(y, convolution.short_conv(x, taps, bias, ids))


def test_a_document_equals_itself_alone():
    x, taps, bias = map(jnp.asarray, arrays(7, 4))
    start = empty_history(2, 3, 4)
    ids = jnp.array([[0, 0, 1, 1, 1, 1, 1]] * 2)
    together = short_conv(x, taps, bias, start, ids)
    alone = [short_conv(part, taps, bias, start) for part in (x[..., :2], x[..., 2:])]
    np.testing.assert_array_equal(together, jnp.concatenate(alone, axis=-1))


def test_the_history_belongs_to_the_first_document():
    x, taps, bias = map(jnp.asarray, arrays(7, 4))
    whole = short_conv(x, taps, bias, empty_history(2, 3, 4))
    history = advance_history(empty_history(2, 3, 4), x[..., :2])
    ids = jnp.array([[3, 3, 3, 8, 8]] * 2)
    y = short_conv(x[..., 2:], taps, bias, history, ids)
    np.testing.assert_array_equal(y[..., :3], whole[..., 2:5])
