import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from grid import in_grid
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tolerances import assert_close

from hyena_jax.ops.fast.matmul_fft import factors, matmul_fft_conv
from hyena_jax.ops.long_conv import (
    blockwise_conv,
    direct_conv,
    fft_conv,
    fft_len,
    long_conv,
    toeplitz_conv,
)
from hyena_jax.reference import convolution

METHODS = (direct_conv, fft_conv, matmul_fft_conv, toeplitz_conv)
compiled = jax.jit(long_conv, static_argnums=3)


def arrays(length: int, dtype=np.float32):
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in ((2, 3, length), (3, length), (3,)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [127, *in_grid(1, 2, 7, 64, 97)])
def test_equals_the_definition(method, length):
    u, h, skip = arrays(length)
    assert_close(compiled(u, h, skip, method), convolution.long_conv(u, h, skip))


@pytest.mark.parametrize(("length", "block_len"), [(1, None), (13, None), (13, 5), (13, 17)])
def test_blocks_of_both_directions_equal_the_definition(length, block_len):
    """Two groups of three channels; the last block is incomplete."""
    rng = np.random.default_rng(length)
    u, h, future, skip = (rng.standard_normal(shape) for shape in ((2, 3, 4, length), (3, 17), (3, 17), (3,)))
    with jax.enable_x64(True):
        y = np.asarray(jax.jit(blockwise_conv, static_argnums=3)(u, h, skip, block_len, future))
    for start in range(0, length, block_len or length):
        block = u.transpose(0, 2, 1, 3).reshape(8, 3, length)[..., start : start + (block_len or length)]
        expected = convolution.long_conv(block, h, skip)
        expected += convolution.long_conv(block[..., ::-1], future, np.zeros(3))[..., ::-1]
        expected = expected.reshape(2, 4, 3, -1).transpose(0, 2, 1, 3)
        assert_close(y[..., start : start + block.shape[-1]], expected)


@pytest.mark.parametrize("method", [None, *in_grid(*METHODS)])
def test_bfloat16_input_is_convolved_in_float32(method):
    u, h, skip = arrays(97)
    u = u.astype(jnp.bfloat16)
    y = compiled(u, h, skip, method)
    assert y.dtype == jnp.bfloat16
    # Only the result is rounded: half a unit in the last of 8 bits.
    expected = convolution.long_conv(u, h, skip)
    assert np.all(np.abs(np.float64(y) - expected) <= 2.0**-8 * np.abs(expected) + 1e-4)


def assert_results_equal_those_of_the_direct_form(convolve, args):
    """The value y of convolve(method, *args) and the gradients of a weighted sum of y^2; returns y."""

    @jax.jit
    def results(*args):
        def loss(method, *args):
            y = convolve(method, *args)
            return (jnp.cos(jnp.arange(y.size)).reshape(y.shape) * y**2).sum(), y

        argnums = range(1, 1 + len(args))
        return [jax.grad(loss, argnums, has_aux=True)(method, *args) for method in METHODS]

    direct, *others = results(*args)
    for ours in others:
        jax.tree.map(assert_close, ours, direct)
    return direct[1]


@pytest.mark.parametrize("length", [127, *in_grid(1, 7, 64)])
def test_gradients_equal_those_of_the_direct_form(length):
    with jax.enable_x64(True):
        args = arrays(length, np.float64)
        y = assert_results_equal_those_of_the_direct_form(
            lambda method, *args: long_conv(*args, method), args
        )
    assert y.dtype == np.float64
    assert_close(y, convolution.long_conv(*args))


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, 4, 1, 7), (3, 1, 1, 7)),
        *in_grid(((4, 3, 7), (3, 7)), ((3, 4, 7), (3, 1, 7)), ((7,), (2, 7)), ((1, 7), (5, 7))),
    ],
)
def test_leading_axes_broadcast_and_gradients_have_the_shapes_of_the_arguments(shapes):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        assert_results_equal_those_of_the_direct_form(
            lambda method, *args: method(*args), [rng.standard_normal(shape) for shape in shapes]
        )


@pytest.mark.parametrize(
    ("shape", "is_thorough"),
    [
        ((3, 4, 7), False),
        *(
            pytest.param(shape, True, marks=pytest.mark.grid)
            for shape in [(3, 4, 7), (4, 3, 7), (3, 1, 7), (7,)]
        ),
    ],
)
def test_derivatives_in_both_modes_where_ffts_are_sharded(shape, is_thorough):
    """Sharded over rows, over the axis before them, and not at all."""
    rng = np.random.default_rng(0)
    args = rng.standard_normal(shape), rng.standard_normal((*shape[:1], 1, 7)[-len(shape) :])
    with jax.enable_x64(True), jax.set_mesh(jax.make_mesh((2, 2), ("a", "b"), (AxisType.Auto,) * 2)):
        check_modes(lambda args: fft_conv(*args), args, is_thorough)


def test_a_sharded_fft_moves_no_rows_between_devices():
    with jax.set_mesh(jax.make_mesh((4,), ("a",), (AxisType.Auto,))):
        rows = NamedSharding(jax.sharding.get_mesh(), PartitionSpec(None, "a"))
        u = jax.device_put(np.ones((3, 4, 7), np.float32), rows)
        h = jax.device_put(np.ones((4, 1, 7), np.float32), NamedSharding(rows.mesh, PartitionSpec()))
        program = jax.jit(lambda u: fft_conv(u, h[:3]), out_shardings=rows).lower(u).compile().as_text()
    assert "c64[3,1,8]" in program  # the spectrum of one row on each device
    assert "all-to-all" not in program
    assert "all-gather" not in program


@pytest.mark.parametrize(
    ("least", "size"), [(1, 1), (2, 2), (7, 8), (13, 15), (127, 128), (193, 200), (253, 256)]
)
def test_fft_len(least, size):
    assert fft_len(least) == size


@pytest.mark.parametrize(
    ("u", "h", "message"),
    [
        (np.ones(7, np.int32), np.ones(7, np.float32), "must be real floating point, got int32 and float32"),
        (np.ones(7, np.float32), np.ones(7, np.complex64), "real floating point, got float32 and complex64"),
        (np.ones(0, np.float32), np.ones(0, np.float32), "length must be at least 1, got 0"),
        (np.ones(7, np.float32), np.ones(5, np.float32), "h must have the length of u"),
    ],
)
def test_what_cannot_be_convolved_is_refused(u, h, message):
    with pytest.raises(ValueError, match=message):
        long_conv(u, h)


@pytest.mark.parametrize(
    ("length", "tile"), [(7, (1, 1)), (1023, (1, 1)), (1024, (8, 128)), (100003, (8, 128))]
)
def test_factors_are_whole_tiles_near_the_root_and_enough(length, tile):
    rows, columns = factors(length)
    assert rows % tile[0] == columns % tile[1] == 0
    assert rows * columns >= length > (rows - tile[0]) * columns
    assert columns == tile[1] or abs(columns - length**0.5) <= max(1, tile[1] // 2)
