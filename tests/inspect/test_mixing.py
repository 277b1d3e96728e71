"""Mixing matrices reproduce the mixer's own output, and nothing comes from the future."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, OPTIONS
from cases.case import D
from grid import grid_but
from tolerances import assert_close

from hyena_jax import mixers
from hyena_jax.inspect import jacobian_norms, mixing, plain_attention, strength
from hyena_jax.mixers.mixing import Probe
from hyena_jax.mixers.parallel import Parallel
from hyena_jax.ops.kernels.recurrence import gpu_recurrence, tpu_recurrence
from hyena_jax.ops.linear_recurrence import linear_recurrence

LENGTH = 13
IN_DEFAULT = ("hyena", "local_attention_grouped", "gated_delta")


def offers(name):
    """Whether a mixer has matrices: `gated_hyena` adds two convolutions of its input."""
    config = (CASES | OPTIONS)[name].config
    mixes_heads = getattr(config, "post_order_ffn", False)
    several = max(getattr(config, "factors", 1), getattr(config, "n_inputs", 1)) > 1
    return not (name.startswith("gated_hyena") or mixes_heads or several)


NAMES = grid_but(filter(offers, CASES | OPTIONS), *IN_DEFAULT)


def build(name):
    """The case's mixer, its perturbed parameters and an input."""
    case, rng = (CASES | OPTIONS)[name], np.random.default_rng(0)
    mixer = mixers.mixer_class(case.config)(D, case.max_len, case.config)
    x = rng.standard_normal((2, LENGTH, D)).astype(np.float32)
    shapes = jax.eval_shape(mixer.init, jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda p: np.float32(0.3) * rng.standard_normal(p.shape, np.float32), shapes)
    return mixer, params, x


@partial(jax.jit, static_argnums=0)
def mixing_and_output(mixer, params, x):
    """The mixing matrices, and what the mixer itself makes of its values, [B, L, N, d]."""
    seq = Probe(x.shape[:2])
    mixer.apply({"params": params}, x, seq, True, method="mix")
    return mixing(mixer, params, x), seq.o


@pytest.mark.parametrize("name", NAMES)
def test_the_matrix_times_the_values_is_the_output(name):
    mixer, params, x = build(name)
    found, expected = jax.device_get(mixing_and_output(mixer, params, x))
    assert found.matrices.shape == (2, found.matrices.shape[1], LENGTH, LENGTH)
    assert found.values.shape[:3] == (2, LENGTH, found.matrices.shape[1])
    outputs = np.einsum("bnts,bsnd->btnd", found.matrices, found.values)
    assert_close(found.outputs(), outputs)
    assert_close(outputs, expected)
    if mixer.config.causal:
        assert not np.triu(found.matrices, 1).any()


NONE = ["hyena_heads", "gated_hyena", "gated_delta_two_factors", "mamba3_three_inputs"]


@pytest.mark.parametrize("name", grid_but(NONE, "hyena_heads", "gated_delta_two_factors"))
def test_mixers_that_mix_no_values_by_a_matrix_each_have_none(name):
    assert mixing(*build(name)) is None


def test_hyena_of_order_2_is_gate_times_filter_times_gate():
    mixer, params, x = build("hyena")

    @jax.jit
    def parts(params):
        bound, seq = mixer.bind({"params": params}), Parallel(x.shape[:2])
        taps, bias = params["short_taps"], params["short_bias"]
        left, right, _ = seq.fir(bound.in_proj(x), taps, bias, axis=-1)
        return left, right, bound.filter(LENGTH), params["skip"]

    left, right, h, skip = jax.device_get(parts(params))
    lag = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    h = np.where(lag >= 0, h[0][:, lag], 0) + skip[0][:, None, None] * np.eye(LENGTH)  # [W, L, L]
    left, right = left.swapaxes(0, 1), right.swapaxes(0, 1)  # [B, W, L]
    assert_close(mixing(mixer, params, x).matrices, left[..., None] * h * right[..., None, :])


def test_the_norms_of_the_jacobian_of_a_gated_sum():
    x = np.random.default_rng(0).standard_normal((1, 6, 4)).astype(np.float32)

    def function(x):
        return jnp.cumsum(jnp.tanh(x), axis=1) * x[..., ::-1]

    blocks = np.asarray(jax.jit(jax.jacobian(function))(x))[0, :, :, 0]  # [t, D, s, D]
    exact = np.sqrt(np.square(blocks).sum((1, 3)))
    norms = jacobian_norms(function, x)
    assert_close(norms, exact)
    assert not np.triu(norms, 1).any()
    estimate = np.asarray(jacobian_norms(function, x, n_probes=4000))
    np.testing.assert_allclose(estimate, exact, rtol=0.1)
    with pytest.raises(ValueError, match=r"x must be \[1, L, D\]"):
        jacobian_norms(function, np.zeros((2, 6, 4), np.float32))


@pytest.mark.grid
@pytest.mark.parametrize(("kernel", "platform"), [(gpu_recurrence, "cuda"), (tpu_recurrence, "tpu")])
def test_the_norms_of_the_jacobian_of_a_recurrence_by_a_kernel(kernel, platform):
    """Of a mixer without matrices, compiled with kernels."""
    x = np.random.default_rng(0).standard_normal((1, 7, 3)).astype(np.float32)

    def function(x, method=None):
        return x * linear_recurrence(jax.nn.sigmoid(x), x, method=method)[0]

    interpreted = partial(function, method=partial(kernel, interpret=True))
    assert_close(jacobian_norms(interpreted, x), jacobian_norms(function, x))
    if platform == "cuda" and jax.__version_info__ >= (0, 12):
        return  # JAX 0.12 lowers Triton kernels, which it deprecates, only where there is a GPU
    by_kernel = jax.jit(partial(jacobian_norms, partial(function, method=kernel)))
    by_kernel.trace(x).lower(lowering_platforms=(platform,))


def test_attention_without_parameters():
    x = np.random.default_rng(0).standard_normal((1, 5, 16))
    attend = jax.jit(plain_attention, static_argnums=1)
    weights = attend(np.float32(x), True)
    assert_close(weights.sum(-1), np.ones((1, 5)))
    assert not np.triu(weights, 1).any()
    np.testing.assert_allclose(attend(np.float32(3 * x + 1), True), weights, rtol=1e-4)
    assert (attend(np.float32(x), False) > 0).all()


def test_strength_is_the_root_mean_square():
    assert_close(strength(np.float32([[[[3.0]], [[4.0]]]])), [[[12.5**0.5]]])
