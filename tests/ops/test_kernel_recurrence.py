"""The kernels, interpreted on a CPU and lowered for a GPU and a TPU."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from test_linear_recurrence import arrays, assert_all_close, exact, results
from tolerances import assert_close

from hyena_jax.ops.kernels.recurrence import gpu_recurrence, tpu_recurrence


# [L, B, D]: one step; several blocks in time and, on a GPU, of channels; several blocks of channels on a TPU.
@pytest.mark.parametrize(
    ("kernel", "shape", "reverse"),
    [
        (tpu_recurrence, (19, 1, 521), True),
        pytest.param(gpu_recurrence, (19, 1, 37), True, marks=pytest.mark.wide),
        *[
            pytest.param(*case, marks=pytest.mark.grid)
            for case in [
                (gpu_recurrence, (19, 1, 37), False),
                (tpu_recurrence, (19, 1, 521), False),
                *itertools.product((gpu_recurrence, tpu_recurrence), [(1, 2, 3)], (False, True)),
                *itertools.product([tpu_recurrence], [(521, 2, 37)], (False, True)),
            ]
        ],
    ],
)
def test_values_and_gradients_equal_the_oracle(shape, kernel, reverse):
    inputs = tuple(map(np.float32, arrays(*shape)))
    assert_all_close(results(partial(kernel, interpret=True), reverse, *inputs), exact(*inputs, reverse))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kernel", "reverse"),
    [(tpu_recurrence, True), pytest.param(gpu_recurrence, False, marks=pytest.mark.grid)],
)
def test_bfloat16(kernel, reverse):
    a, x, h0, weight, last_weight = map(np.float32, arrays(37, 2, 5))
    a, x, weight = (v.astype(jnp.bfloat16) for v in (a, x, weight))
    ours = results(partial(kernel, interpret=True), reverse, a, x, h0, weight, last_weight)
    assert [v.dtype for v in ours] == [jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16, jnp.float32]
    expected = exact(a, x, h0, weight, last_weight, reverse)
    assert_close(ours[1], expected[1])  # the state is not rounded between blocks
    assert_all_close(ours, expected, "bfloat16")


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
