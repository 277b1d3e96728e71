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
    toeplitz,
    toeplitz_conv,
)
from hyena_jax.reference import convolution

METHODS = (fft_conv, matmul_fft_conv, toeplitz_conv, direct_conv, None)
FAST_METHODS = METHODS[:3]
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


@pytest.mark.parametrize("method", METHODS)
def test_equals_the_definition_in_float64(method):
    with jax.enable_x64(True):
        u, h, skip = arrays(127, np.float64)
        y = compiled(u, h, skip, method)
        assert y.dtype == jnp.float64
        assert_close(y, convolution.long_conv(u, h, skip))


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_input_is_convolved_in_float32(method):
    u, h, skip = arrays(97)
    u = u.astype(jnp.bfloat16)
    y = compiled(u, h, skip, method)
    assert y.dtype == jnp.bfloat16
    # Only the result is rounded: half a unit in the last of 8 bits.
    expected = convolution.long_conv(u, h, skip)
    assert np.all(np.abs(np.float64(y) - expected) <= 2.0**-8 * np.abs(expected) + 1e-4)


def assert_gradients_equal_those_of_the_direct_form(convolve, args):
    """Of a weighted sum of squares of convolve(method, *args), with respect to all arrays."""

    @jax.jit
    def gradients(*args):
        def loss(method, *args):
            y = convolve(method, *args)
            return (jnp.cos(jnp.arange(y.size)).reshape(y.shape) * y**2).sum()

        return [
            jax.grad(loss, range(1, 1 + len(args)))(method, *args) for method in (direct_conv, *FAST_METHODS)
        ]

    direct, *others = gradients(*args)
    for ours in others:
        jax.tree.map(assert_close, ours, direct)


@pytest.mark.parametrize("length", [127, *in_grid(1, 7, 64)])
def test_gradients_equal_those_of_the_direct_form(length):
    with jax.enable_x64(True):
        assert_gradients_equal_those_of_the_direct_form(
            lambda method, *args: long_conv(*args, method), arrays(length, np.float64)
        )


@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 3, 7), (3, 7)),
        ((2, 3, 4, 1, 7), (3, 1, 1, 7)),
        *in_grid(((3, 4, 7), (3, 1, 7)), ((7,), (2, 7)), ((1, 7), (5, 7))),
    ],
)
def test_leading_axes_broadcast_and_gradients_have_the_shapes_of_the_arguments(shapes):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        assert_gradients_equal_those_of_the_direct_form(
            lambda method, *args: method(*args), [rng.standard_normal(shape) for shape in shapes]
        )


@pytest.mark.grid
@pytest.mark.parametrize("method", METHODS[:-1])
@pytest.mark.parametrize("length", [7, 1])
def test_derivatives_in_both_modes(length, method):
    with jax.enable_x64(True):
        check_modes(lambda args: long_conv(*args, method), arrays(length), is_thorough=True)


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
    ("method", "tolerance"), [(toeplitz_conv, 0), (direct_conv, 0), (fft_conv, 2e-5), (matmul_fft_conv, 2e-5)]
)
def test_future_inputs_have_no_gradient(method, tolerance):
    """Through the FFT: none beyond rounding."""
    u, h, _ = arrays(33)
    gradient = jax.jit(jax.grad(lambda u, t: method(u, h)[..., t].sum()))
    for t in (0, 16, 31):
        assert np.abs(np.asarray(gradient(u, t))[..., t + 1 :]).max() <= tolerance * np.abs(h).max()


def test_toeplitz_matrix_entries():
    h = np.arange(1.0, 4.0, dtype=np.float32)
    np.testing.assert_array_equal(toeplitz(h), [[1, 0, 0], [2, 1, 0], [3, 2, 1]])


@pytest.mark.parametrize(
    ("least", "size"), [(1, 1), (2, 2), (7, 8), (13, 15), (127, 128), (193, 200), (253, 256)]
)
def test_fft_len(least, size):
    assert fft_len(least) == size


@pytest.mark.parametrize("dtypes", [("int32", "float32"), ("float32", "int32"), ("complex64", "float32")])
def test_what_is_not_real_floating_point_is_refused(dtypes):
    with pytest.raises(ValueError, match=f"must be real floating point, got {dtypes[0]} and {dtypes[1]}"):
        long_conv(*(np.ones((2, 7), dtype) for dtype in dtypes))


def test_no_tokens_are_refused():
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        long_conv(np.zeros((2, 0), np.float32), np.zeros((2, 0), np.float32))


@pytest.mark.parametrize("length", [1, 2, 7, 64, 97, 1000, 1023])
def test_factors_are_near_the_root_and_enough(length):
    rows, columns = factors(length)
    assert rows <= columns
    assert rows * columns >= length > (rows - 1) * columns
    assert (columns - 1) ** 2 < length


@pytest.mark.parametrize("length", [1024, 1025, 4096, 10007, 32768, 65536, 100003])
def test_factors_of_a_long_sequence_are_whole_tiles_near_the_root_and_enough(length):
    rows, columns = factors(length)
    assert rows % 8 == 0
    assert columns % 128 == 0
    assert rows * columns >= length > (rows - 8) * columns
    assert columns == 128 or abs(columns - length**0.5) <= 64


def test_a_filter_of_another_length_is_refused():
    u, h, _ = arrays(7)
    with pytest.raises(ValueError, match="h must have the length of u"):
        long_conv(u, h[:, :5])
