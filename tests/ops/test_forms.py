"""Which forms a platform takes, and the check of its kernels before their first use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyena_jax import parallel
from hyena_jax.config import ParallelConfig
from hyena_jax.ops.attention import Visible, plain_attention
from hyena_jax.ops.fast.blocked_attention import BLOCK_ROWS, ROW_MAXIMUM
from hyena_jax.ops.forms import forms_for
from hyena_jax.ops.kernels import check
from hyena_jax.ops.linear_recurrence import associative_recurrence, loop_recurrence
from hyena_jax.ops.long_conv import fft_conv
from hyena_jax.system.errors import UserError


@pytest.mark.parametrize("kernels", [False, True])
def test_a_cpu_takes_the_same_forms_with_and_without_kernels(kernels):
    assert forms_for() == forms_for("cpu", kernels)
    assert forms_for("cpu")[:2] == (fft_conv, loop_recurrence)


@pytest.mark.parametrize("platform", ["gpu", "tpu", "other"])
def test_recurrences_take_a_kernel_where_there_is_one_and_64_bits_are_off(platform):
    name = "associative_recurrence" if platform == "other" else f"{platform}_recurrence"
    assert forms_for(platform, kernels=True).recurrence.__name__ == name
    assert forms_for(platform).recurrence is associative_recurrence
    with jax.enable_x64(True):
        assert forms_for(platform, kernels=True).recurrence is associative_recurrence


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(("length", "is_middle"), [(128, False), (129, True), (8192, True), (8193, False)])
def test_a_tpu_takes_products_of_matrices_and_one_kernel_for_lengths_between(length, is_middle, kernels):
    u, h = (jax.ShapeDtypeStruct((3, rows, length), jnp.float32) for rows in (2, 1))
    program = str(jax.make_jaxpr(forms_for("tpu", kernels).convolution)(u, h))
    assert ("pallas_call" in program) == (is_middle and kernels)
    assert "fft[" not in program


def test_many_queries_take_blocks_on_a_cpu():
    assert forms_for("gpu").attention is forms_for("tpu").attention is plain_attention
    attend = forms_for("cpu").attention
    for n_queries, is_blocked in ((BLOCK_ROWS, False), (BLOCK_ROWS + 1, True)):
        q = jnp.zeros((1, n_queries, 1, 2))
        jaxpr = str(jax.make_jaxpr(lambda q: attend(q, q, q, Visible(True)))(q))
        assert (ROW_MAXIMUM in jaxpr) == is_blocked


def broken(x):
    raise NotImplementedError("Mosaic refuses this\nand says why")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (lambda x: jnp.square(x) * (1 + 1e-6), None),
        (lambda x: jnp.square(x).at[0].add(1e-2), "the kernel own differs from its plain form by"),
        (lambda x: jax.lax.stop_gradient(x) * x, "the kernel own differs from its plain form by 5.0e-01"),
        (lambda x: jnp.square(x) * jnp.nan, "the kernel own differs from its plain form by nan"),
        (broken, "the kernel own does not run here: Mosaic refuses this"),
    ],
)
def test_a_kernel_is_compared_in_values_and_gradients_with_its_plain_form_at_full_precision(kernel, message):
    """At less, no kernel would be close enough to it on a TPU."""
    precisions = []

    def plain(x):
        precisions.append(jax.config.jax_default_matmul_precision)
        return jnp.square(x)

    found = check._difference("cpu", "own", kernel, plain, [np.float32([1, 2, 3])])
    assert found is message is None or found.startswith(message)
    assert precisions == ["highest"] * (kernel is not broken)


def test_kernels_of_a_device_that_is_not_there_are_not_usable():
    assert not check.usable("cpu")
    assert not check.usable("tpu")
    assert "does not run here" in check.fault("tpu")


@pytest.mark.parametrize(("choice", "platforms"), [("auto", {"tpu"}), ("on", {"gpu", "tpu"}), ("off", set())])
def test_a_tpu_takes_kernels_by_default_and_a_gpu_where_asked(choice, platforms):
    config = ParallelConfig(kernels=choice)
    assert {name for name in ("cpu", "gpu", "tpu") if parallel.wants_kernels(config, name)} == platforms


@pytest.mark.parametrize("fault", [None, "the kernel own does not run here: no"])
def test_kernels_that_differ_are_off_or_an_error_where_asked_for(monkeypatch, fault):
    with pytest.raises(UserError, match="parallel.kernels must be 'off' or 'auto' on a cpu, which has none"):
        parallel.make_strategy(ParallelConfig(kernels="on"))
    monkeypatch.setattr(parallel, "HAVE_KERNELS", ("cpu",))
    monkeypatch.setattr(parallel, "wants_kernels", lambda config, platform: config.kernels != "off")
    monkeypatch.setattr(parallel, "kernel_fault", lambda platform: fault)
    assert not parallel.make_strategy(ParallelConfig(kernels="off")).layout.kernels
    assert parallel.make_strategy(ParallelConfig()).layout.kernels == (fault is None)
    if fault is None:
        assert parallel.make_strategy(ParallelConfig(kernels="on")).layout.kernels
    else:
        with pytest.raises(UserError, match="parallel.kernels must be 'off' or 'auto' on these devices: the"):
            parallel.make_strategy(ParallelConfig(kernels="on"))
