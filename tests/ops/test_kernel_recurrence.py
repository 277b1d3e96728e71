"""The kernels, interpreted on a CPU and lowered for a GPU and a TPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from tolerances import assert_close

from hyena_jax.ops.kernels.recurrence import gpu_recurrence, tpu_recurrence
from hyena_jax.ops.linear_recurrence import linear_recurrence
from hyena_jax.reference import recurrence


def arrays(batch: int, length: int, channels: int):
    """a in (-1, 1), x, h0 and a weight for each output, float32."""
    rng = np.random.default_rng(0)
    shape, state = (batch, length, channels), (batch, channels)
    values = rng.uniform(-1, 1, shape), *map(rng.standard_normal, (shape, state, shape, state))
    return tuple(map(np.float32, values))


@partial(jax.jit, static_argnums=(0, 1))
def results(kernel, reverse, a, x, h0, weight, last_weight):
    """h, the last h, and the gradients of their weighted sum with respect to a, x and h0."""
    outputs, pull_back = jax.vjp(lambda *args: linear_recurrence(*args, reverse, kernel), a, x, h0)
    return *outputs, *pull_back((weight, last_weight))


def exact(a, x, h0, weight, last_weight, reverse):
    """The same by the oracle, in float64."""
    a, x, h0, weight, last_weight = map(np.float64, (a, x, h0, weight, last_weight))
    h, last = recurrence.linear_recurrence(a, x, h0, reverse)
    if reverse:
        a, h, weight = a[:, ::-1], h[:, ::-1], weight[:, ::-1]
    before = np.concatenate([h0[:, None], h[:, :-1]], axis=1)
    weight = weight.copy()
    weight[:, -1] += last_weight
    later = np.concatenate([a[:, 1:], np.zeros_like(a[:, :1])], axis=1)
    g, _ = recurrence.linear_recurrence(later, weight, np.zeros_like(h0), reverse=True)
    a_bar, h0_bar = g * before, a[:, 0] * g[:, 0]
    if reverse:
        a_bar, g, h = a_bar[:, ::-1], g[:, ::-1], h[:, ::-1]
    return h, last, a_bar, g, h0_bar


# One step; several blocks in time and, on a GPU, of channels; several blocks of channels on a TPU.
@pytest.mark.parametrize(
    ("kernel", "shape", "reverse"),
    [
        pytest.param(gpu_recurrence, (1, 19, 37), True, marks=pytest.mark.wide),
        (tpu_recurrence, (1, 19, 521), True),
        pytest.param(gpu_recurrence, (2, 1, 3), False, marks=pytest.mark.grid),
        pytest.param(tpu_recurrence, (2, 1, 3), False, marks=pytest.mark.grid),
        pytest.param(gpu_recurrence, (1, 19, 37), False, marks=pytest.mark.grid),
        pytest.param(tpu_recurrence, (2, 521, 37), False, marks=pytest.mark.grid),
        pytest.param(gpu_recurrence, (2, 1, 3), True, marks=pytest.mark.grid),
        pytest.param(tpu_recurrence, (2, 1, 3), True, marks=pytest.mark.grid),
        pytest.param(tpu_recurrence, (2, 521, 37), True, marks=pytest.mark.grid),
        pytest.param(tpu_recurrence, (1, 19, 521), False, marks=pytest.mark.grid),
    ],
)
def test_values_and_gradients_equal_the_oracle(shape, kernel, reverse):
    inputs = arrays(*shape)
    ours = results(partial(kernel, interpret=True), reverse, *inputs)
    for values, theirs in zip(ours, exact(*inputs, reverse), strict=True):
        assert_close(values, theirs)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kernel", "reverse"),
    [(tpu_recurrence, True), pytest.param(gpu_recurrence, False, marks=pytest.mark.grid)],
)
def test_bfloat16(kernel, reverse):
    a, x, h0, weight, last_weight = arrays(2, 37, 5)
    a, x, weight = (v.astype(jnp.bfloat16) for v in (a, x, weight))
    ours = results(partial(kernel, interpret=True), reverse, a, x, h0, weight, last_weight)
    assert [v.dtype for v in ours] == [jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16, jnp.float32]
    expected = exact(*map(np.float32, (a, x, h0, weight, last_weight)), reverse)
    assert_close(ours[1], expected[1])  # the state is not rounded between blocks
    for values, theirs in zip(ours, expected, strict=True):
        assert_close(values, theirs, "bfloat16")


@pytest.mark.grid
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("kernel", "platform", "call"),
    [(gpu_recurrence, "cuda", "xla.gpu.triton"), (tpu_recurrence, "tpu", "tpu_custom_call")],
)
def test_lowers_to_one_kernel_each_way(kernel, platform, call, dtype, reverse):
    """Lowering needs no device; the device's own compiler is not tested."""
    if platform == "cuda" and jax.__version_info__ >= (0, 12):
        pytest.skip("JAX 0.12 lowers Triton kernels, which it deprecates, only where there is a GPU")
    sequence = jax.ShapeDtypeStruct((2, 131, 37), dtype)
    state = jax.ShapeDtypeStruct((2, 37), jnp.float32)
    traced = results.trace(kernel, reverse, sequence, sequence, state, sequence, state)
    assert traced.lower(lowering_platforms=(platform,)).as_text().count(call) == 2


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(2, 131, 37), (4, 2048, 2560)])
def test_mosaic_compiles_it_for_a_tpu(v5e, shape, dtype):
    device = SingleDeviceSharding(v5e[0])
    sequence = jax.ShapeDtypeStruct(shape, dtype, sharding=device)
    state = jax.ShapeDtypeStruct(shape[::2], jnp.float32, sharding=device)
    lowered = results.lower(tpu_recurrence, False, sequence, sequence, state, sequence, state)
    program = lowered.compile().as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == 2
