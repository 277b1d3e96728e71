import jax
import jax.numpy as jnp
import numpy as np
import pytest
from differences import assert_equal_differences
from grid import in_grid
from tolerances import assert_close

from hyena_jax.ops.short_conv import advance_history, short_conv
from hyena_jax.reference import convolution

# Orders of axes: where channels and time of x [B, C, L] are.
LAYOUTS = {"channels_first": (1, 0, 2), "channels_last": (0, 2, 1)}
IDS = np.array([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])


def arrays(length: int, n_taps: int, dtype=np.float32):
    rng = np.random.default_rng(length)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in ((2, 3, length), (3, n_taps), (3,)))


def filtered(x, taps, bias, history=None, segment_ids=None, layout="channels_first"):
    """`short_conv` of x [B, C, L] with taps [C, K], in the given order of axes."""
    order = LAYOUTS[layout]
    axis = order.index(2)

    def laid_out(x):
        return None if x is None else jnp.asarray(x).transpose(order)

    y = short_conv(
        laid_out(x),
        jnp.stack([laid_out(tap[None, :, None]) for tap in jnp.asarray(taps).T]),
        laid_out(jnp.asarray(bias)[None, :, None]),
        axis,
        laid_out(history),
        laid_out(None if segment_ids is None else jnp.asarray(segment_ids)[:, None]),
    )
    return y.transpose(np.argsort(order))


compiled = jax.jit(filtered, static_argnames="layout")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n_taps", [1, 4, *in_grid(3)])
@pytest.mark.parametrize("length", [127, *in_grid(1, 2, 7, 64)])
def test_equals_the_definition(length, n_taps, layout):
    x, taps, bias = arrays(length, n_taps)
    expected = convolution.short_conv(x, taps, bias)
    assert_close(compiled(x, taps, bias, layout=layout), expected)
    assert_close(compiled(x, taps, bias, np.zeros((2, 3, n_taps - 1), np.float32), layout=layout), expected)


@pytest.mark.parametrize("split", [3, *in_grid(0, 1, 2, *range(4, 8))])
def test_in_two_parts_equals_whole(split):
    x, taps, bias = arrays(7, 4)
    start = np.zeros((2, 3, 3), np.float32)
    first = compiled(x[..., :split], taps, bias, start)
    history = advance_history(start, x[..., :split], -1)
    second = compiled(x[..., split:], taps, bias, history)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=-1), compiled(x, taps, bias, start))


@pytest.mark.parametrize(
    ("ids", "length", "layout"),
    [
        (IDS, 7, "channels_first"),
        (IDS, 7, "channels_last"),
        pytest.param(None, 7, "channels_last", marks=pytest.mark.grid),
        pytest.param(None, 2, "channels_first", marks=pytest.mark.grid),
    ],
)
def test_gradients_equal_central_differences_of_the_definition(ids, length, layout):
    with jax.enable_x64(True):
        args = arrays(length, 3, np.float64)
        weight = np.random.default_rng(0).standard_normal(args[0].shape)

        @jax.jit
        def gradients(*args):
            return jax.vjp(lambda *args: filtered(*args, segment_ids=ids, layout=layout), *args)[1](weight)

        found = jax.device_get(gradients(*args))
    assert_equal_differences(found, lambda *args: (weight * convolution.short_conv(*args, ids)).sum(), args)


def test_gradients_of_rows_with_their_own_documents_may_be_mapped():
    with jax.enable_x64(True):
        x, taps, bias = arrays(7, 3, np.float64)

        def gradient(x, ids):
            return jax.grad(lambda x: (filtered(x, taps, bias, segment_ids=ids) ** 2).sum())(x)

        found = np.asarray(jax.jit(jax.vmap(gradient))(x[:, None], IDS[:, None]))[:, 0]
    assert_equal_differences(found, lambda x: (convolution.short_conv(x, taps, bias, IDS) ** 2).sum(), (x,))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n_taps", [4, *in_grid(1, 3)])
def test_documents_equal_the_definition(n_taps, layout):
    x, taps, bias = arrays(31, n_taps)
    ids = np.repeat([[0, 1, 2, 3], [5, 4, -1, 0]], [5, 1, 17, 8], axis=1)
    y = compiled(x, taps, bias, None, ids, layout=layout)
    assert_close(y, convolution.short_conv(x, taps, bias, ids))


def test_segments_and_a_history_are_refused_together():
    x, taps, bias = arrays(7, 4)
    with pytest.raises(ValueError, match="segment_ids must be None when history is given"):
        compiled(x, taps, bias, np.zeros((2, 3, 3), np.float32), np.zeros((2, 7), int))
