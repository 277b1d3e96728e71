from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from hyena_jax.ops.kernels.long_conv import fused_conv
from hyena_jax.ops.kernels.recurrence import tpu_recurrence
from hyena_jax.plan.kernels import kernels


def counted(f, *shapes):
    return kernels(jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)))


def small_kernel(precision, x_ref, w_ref, y_ref):
    """On blocks [8, 128]: a product; an addition where the grid's second axis begins; some in a loop."""
    x = jnp.dot(x_ref[...], w_ref[...], precision=precision)

    @pl.when(pl.program_id(1) == 0)
    def _():
        y_ref[...] = x + 1

    def add(i, _):
        y_ref[...] += x

    jax.lax.fori_loop(0, 3 - pl.program_id(0), add, None)


def small_call(precision, x, w):
    return pl.pallas_call(
        partial(small_kernel, precision),
        out_shape=jax.ShapeDtypeStruct((16, 256), jnp.float32),
        grid=(2, 2, 2),
        in_specs=[
            pl.BlockSpec((8, 128), lambda i, j, k: (i, 0)),
            pl.BlockSpec((128, 128), lambda i, j, k: (0, j)),
        ],
        out_specs=pl.BlockSpec((8, 128), lambda i, j, k: (i, j)),
        name="small",
    )(x, w)


@pytest.mark.parametrize(("precision", "passes"), [(None, 1), ("high", 3), ("highest", 6)])
def test_a_kernel_counted_by_hand(precision, passes):
    (kernel,) = counted(partial(small_call, precision), (16, 100), (100, 200))
    assert kernel.name == "small"
    # x: two blocks, each once. w: its two blocks, [100, 128] and [100, 72], once for each i. y: four blocks.
    assert kernel.hbm_bytes == 4 * (2 * 8 * 100 + 2 * 100 * 200 + 4 * 8 * 128)
    assert kernel.work.products == passes * 8 * 2 * 8 * 128 * 128
    # x + 1 at the 4 points with j = 0; 3 additions at the 4 points with i = 0, and 2 at the others.
    assert kernel.work.vector == 8 * 128 * (4 + 4 * 3 + 4 * 2)


def test_a_row_takes_a_whole_register():
    def double(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    def f(x):
        return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct((1, 130), jnp.float32))(x)

    (kernel,) = counted(f, (1, 130))
    assert kernel.work.vector == 8 * 256


def test_a_branch_on_data_is_refused():
    def negate(x_ref, y_ref):
        @pl.when(x_ref[0, 0] > 0)
        def _():
            y_ref[...] = -x_ref[...]

    def f(x):
        return pl.pallas_call(negate, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32))(x)

    with pytest.raises(ValueError, match="position in the grid"):
        counted(f, (8, 128))


@pytest.mark.grid
@pytest.mark.parametrize("batch", [8, 33])  # one block of 32 rows, and two
def test_the_fused_convolution_and_its_gradient(batch):
    """Each array crosses HBM once; 6 passes over products with [256, 256] for every transform."""
    shapes = (16, batch, 512), (16, 1, 512)

    def run(u, h):
        y, pull_back = jax.vjp(fused_conv, u, h)
        return pull_back(y)

    forward, backward = counted(run, *shapes)
    u, h = (np.prod(shape) for shape in shapes)
    tables = 4 * 2 * 4 * 128 + 2 * 2 * 3 * 256 * 256
    assert forward.hbm_bytes == 4 * (2 * u + h) + tables
    assert backward.hbm_bytes == 4 * (3 * u + 2 * h) + tables
    assert forward.work.products == 6 * 2 * (2 * u + h) / 128 * 256 * 256
    assert backward.work.products == 6 * 2 * (3 * u + 2 * h) / 128 * 256 * 256


def test_the_recurrence_and_its_gradient_read_and_write_each_array_once():
    shape = 2, 512, 2048

    def run(a, x, h0):
        outputs, pull_back = jax.vjp(tpu_recurrence, a, x, h0)
        return pull_back(outputs)

    forward, backward = counted(run, shape, shape, shape[::2])
    size, state = np.prod(shape), 2 * 2048
    assert forward.hbm_bytes == 4 * (3 * size + 2 * state)
    neighbours = 2 * 2 * 16 * 2048  # a tile of h for each sequence and block of 256 steps
    assert backward.hbm_bytes == 4 * (5 * size + neighbours + 3 * state)
    # A product, an addition and the choice of rows before L; in the backward pass another product and choice.
    assert 3 * size <= forward.work.vector <= 4 * size
    assert 5 * size <= backward.work.vector <= 8 * size
