"""The fused convolution, interpreted on a CPU and lowered for a TPU."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import in_grid
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from tolerances import assert_close

from hyena_jax.ops.fast.matmul_fft import matmul_fft_conv
from hyena_jax.ops.kernels import long_conv
from hyena_jax.ops.kernels.long_conv import fused_conv

# The largest error allowed, relative to the largest expected magnitude.
TOLERANCE = {"high": 1e-5, "highest": 6e-7}
# Rows of the batch in blocks of two, so that the last has one.
RAGGED = (3, 3, 131)
LONG = [(3, 2, 1021), (9, 1, 2047), (17, 3, 2048), (2, 17, 2048), (8, 5, 8192), (1, 1, 8191)]

interpreted = partial(fused_conv, interpret=True)


def arrays(channels: int, batch: int, length: int):
    """u, a filter h of lags that decay, and a weight for each output, float32."""
    rng = np.random.default_rng(0)
    u, weight = (np.float32(rng.standard_normal((channels, batch, length))) for _ in range(2))
    h = rng.standard_normal((channels, 1, length)) * np.exp(-4 * np.arange(length) / length)
    return u, np.float32(h), weight


def exact(u, h, weight):
    """y, and the gradients of its weighted sum with respect to u and h: FFTs of 2L points in float64."""
    length = u.shape[-1]
    of_u, of_h, of_weight = (np.fft.rfft(np.float64(x), 2 * length) for x in (u, h, weight))
    of_h_bar = (of_weight * of_u.conj()).sum(1, keepdims=True)
    spectra = of_u * of_h, of_weight * of_h.conj(), of_h_bar
    return [np.fft.irfft(x, 2 * length)[..., :length] for x in spectra]


@partial(jax.jit, static_argnums=0)
def results(method, u, h, weight):
    y, pull_back = jax.vjp(method, u, h)
    return y, *pull_back(weight)


# Blocks with too few channels; a second block of the batch with two rows; a transform of 3 x 128 points.
@pytest.mark.parametrize(
    ("shape", "precision"),
    [
        (RAGGED, "highest"),
        pytest.param((3, 2, 131), "highest", marks=pytest.mark.grid),
        pytest.param((3, 130, 131), "highest", marks=pytest.mark.grid),
        pytest.param((3, 2, 257), "high", marks=pytest.mark.grid),
        *[pytest.param(*case, marks=pytest.mark.grid) for case in itertools.product(LONG, TOLERANCE)],
    ],
)
def test_values_and_gradients_equal_the_oracle(shape, precision, monkeypatch):
    """Largest errors measured over these shapes: 2.7e-7 at "highest", as of `fft_conv`; 7.1e-6 at "high"."""
    if shape == RAGGED:
        monkeypatch.setattr(long_conv, "BLOCK_SIZE", 2 * 8 * 256)
    u, h, weight = arrays(*shape)
    method = partial(fused_conv, precision=precision, interpret=True)
    for ours, theirs in zip(results(method, u, h, weight), exact(u, h, weight), strict=True):
        assert np.abs(ours - theirs).max() <= TOLERANCE[precision] * np.abs(theirs).max()


@pytest.mark.grid
def test_groups_of_channels_share_filters():
    u, h, weight = (np.stack([x, 2 * x]) for x in arrays(3, 2, 131))
    ours = results(interpreted, u, h[0], weight)
    y, u_bar, h_bar = zip(*map(exact, u, h[:1].repeat(2, axis=0), weight), strict=True)
    for a, b in zip(ours, (np.stack(y), np.stack(u_bar), sum(h_bar)), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("shapes", [((4, 3, 7), (3, 7)), ((3, 4, 7), (1, 1, 7)), ((7,), (2, 7))])
def test_other_shapes_take_the_form_without_a_kernel(shapes):
    u, h = (np.ones(shape, np.float32) for shape in shapes)
    assert "pallas_call" not in str(jax.make_jaxpr(fused_conv)(u, h))


@pytest.mark.grid
def test_forward_mode_and_second_derivatives_equal_those_without_a_kernel():
    u, h, weight = arrays(2, 1, 131)

    def derivatives(method):
        def loss(u, h):
            return (weight * method(u, h) ** 2).sum()

        def slope(u, h):
            return sum(
                (x_bar * x).sum() for x_bar, x in zip(jax.grad(loss, (0, 1))(u, h), (h, u), strict=True)
            )

        tangent = jax.jvp(method, (u, h), (weight, h))[1]
        return tangent, jax.grad(slope, (0, 1))(u, h)

    ours, theirs = (jax.jit(partial(derivatives, method))() for method in (interpreted, matmul_fft_conv))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert_close(a, b)


@pytest.mark.grid
@pytest.mark.parametrize("shape", [(3, 4, 131), (4, 3, 131), (3, 3, 131)])
def test_where_xla_shards_arrays_each_device_convolves_its_rows(shape):
    """Sharded over the batch, over channels, and not at all."""
    u, h, weight = arrays(*shape)
    with jax.set_mesh(jax.make_mesh((2, 2), ("a", "b"), (AxisType.Auto,) * 2)):
        ours = results(interpreted, u, h, weight)
    for a, b in zip(ours, exact(u, h, weight), strict=True):
        assert_close(a, b)


@pytest.mark.grid
def test_runs_on_shards():
    u, h, weight = arrays(3, 4, 131)
    mesh = jax.make_mesh((4,), ("a",), (AxisType.Auto,))
    rows, whole = PartitionSpec(None, "a"), PartitionSpec()
    sharded = jax.shard_map(interpreted, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    for a, b in zip(results(sharded, u, h, weight), exact(u, h, weight), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("shape", [(5, 3, 131), *in_grid((16, 8, 2048), (12, 12, 8192))])
def test_lowers_to_one_kernel_each_way(shape):
    """Lowering needs no device; the device's own compiler is not tested."""
    u, h = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (shape[0], 1, shape[2])))
    lowered = results.trace(fused_conv, u, h, u).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 2


def gradients(u, h, weight):
    return jax.vjp(fused_conv, u, h)[1](weight)


@pytest.mark.grid
@pytest.mark.parametrize("shape", [(40, 8, 2048), (9, 3, 8192), (5, 1, 131)])
def test_mosaic_compiles_it_for_a_tpu(v5e, shape):
    device = SingleDeviceSharding(v5e[0])
    u, h = (jax.ShapeDtypeStruct(s, jnp.float32, sharding=device) for s in (shape, (shape[0], 1, shape[2])))
    for run, args in ((fused_conv, (u, h)), (gradients, (u, h, u))):
        program = jax.jit(run).lower(*args).compile().as_text()
        assert program.count('custom_call_target="tpu_custom_call"') == 1


@pytest.mark.grid
def test_on_tpus_each_device_convolves_its_rows(v5e):
    """The rows stay where they are; only the gradient of the filters is summed over the devices."""
    mesh = Mesh(np.array(v5e), ("a",), axis_types=(AxisType.Auto,))
    rows, whole = (NamedSharding(mesh, PartitionSpec(None, axis)) for axis in ("a", None))
    u = jax.ShapeDtypeStruct((16, 8, 512), jnp.float32, sharding=rows)
    h = jax.ShapeDtypeStruct((16, 1, 512), jnp.float32, sharding=whole)
    with jax.set_mesh(mesh):
        program = jax.jit(gradients, out_shardings=(rows, whole)).lower(u, h, u).compile().as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == 1
    assert "all-reduce" in program
    assert "all-gather" not in program
    assert "all-to-all" not in program
