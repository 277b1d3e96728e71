"""The fused delta rule, interpreted on a CPU, lowered for a TPU and compiled ahead of time for TPUs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from differences import assert_equal_differences
from jax.sharding import SingleDeviceSharding
from test_delta_rule import (
    GATED_DELTA,
    KDA,
    MAMBA2,
    MAMBA3,
    RWKV7,
    Inputs,
    arrays,
    in_float32,
    some_starts,
    weighted_sum,
)
from tolerances import assert_close

from hyena_jax.ops.delta_rule import delta_rule
from hyena_jax.ops.kernels.delta_rule import fused_delta_rule
from hyena_jax.plan.kernels import kernels
from hyena_jax.plan.targets import parse_target
from hyena_jax.reference.delta_rule import delta_rule as loop

fused = partial(fused_delta_rule, interpret=True)
RULES = {"head": GATED_DELTA, "channel": KDA, "write": RWKV7, "nothing_erased": MAMBA2}


@pytest.mark.parametrize(
    ("name", "length", "chunk", "has_starts"),
    [
        ("channel", 37, 16, True),
        pytest.param("head", 37, 16, True, marks=pytest.mark.grid),
        *[
            pytest.param(name, length, chunk, has_starts, marks=pytest.mark.grid)
            for name in RULES
            for length, chunk, has_starts in ((5, 64, False), (19, 8, True), (127, 64, True))
        ],
    ],
)
def test_values_and_gradients_equal_the_oracle(name, length, chunk, has_starts):
    """In float32; gradients along random directions."""
    inputs = arrays(RULES[name], length)
    starts = some_starts(length) if has_starts else None
    document_starts = np.zeros((2, length), bool) if starts is None else starts
    expected = loop(*inputs, document_starts)
    weights = [np.random.default_rng(i).standard_normal(y.shape) for i, y in enumerate(expected)]

    @jax.jit
    def outputs_and_gradients(*inputs):
        outputs, pull_back = jax.vjp(lambda *inputs: fused(*inputs, starts, chunk), *inputs)
        return outputs, pull_back(tuple(map(np.float32, weights)))

    outputs, gradients = jax.device_get(outputs_and_gradients(*in_float32(inputs)))
    for found, y in zip(outputs, expected, strict=True):
        assert_close(found, y)
    assert_equal_differences(
        gradients,
        lambda *inputs: weighted_sum(loop, weights, inputs, document_starts),
        tuple(inputs),
        tolerance=1e-4,
    )


@pytest.mark.grid
@pytest.mark.parametrize("name", ["head", "channel"])
def test_strong_decays_neither_overflow_nor_lose_digits(name):
    inputs = arrays(RULES[name], 64, decay=30.0)
    inputs = inputs._replace(
        log_a=np.where(np.arange(64).reshape(1, -1, *[1] * (inputs.log_a.ndim - 2)) == 20, -1e3, inputs.log_a)
    )
    expected = loop(*inputs, np.zeros((2, 64), bool))
    for found, y in zip(jax.jit(fused)(*in_float32(inputs)), expected, strict=True):
        assert_close(found, y)


@pytest.mark.grid
def test_forward_mode_is_that_of_the_plain_form():
    inputs, starts = in_float32(arrays(GATED_DELTA, 9)), some_starts(9)
    dots = Inputs(*(None if x is None else np.ones_like(x) for x in inputs))
    found, expected = (
        jax.jvp(lambda *inputs, f=f: f(*inputs, starts, 4), inputs, dots) for f in (fused, delta_rule)
    )
    jax.tree.map(assert_close, found[1], expected[1])


@pytest.mark.parametrize(
    "change", ["several_updates", "no_queries", "one_token", pytest.param("float64", marks=pytest.mark.grid)]
)
def test_what_the_kernel_lacks_is_left_to_the_plain_form(change):
    inputs = arrays(MAMBA3 if change == "several_updates" else KDA, 1 if change == "one_token" else 5)
    inputs = inputs if change == "float64" else in_float32(inputs)
    inputs = inputs._replace(q=None) if change == "no_queries" else inputs
    with jax.enable_x64(change == "float64"):
        assert "pallas_call" not in str(jax.make_jaxpr(fused)(*inputs))


def shapes(rule_name: str, length: int, heads: int, n_keys: int, n_values: int, sharding=None) -> list:
    """A call on a batch of 2, with one head of keys for two of values."""
    rule = RULES[rule_name]

    def of(*sizes: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2, *sizes), dtype, sharding=sharding)

    keys, more = of(length, heads // 2, n_keys), of(length, heads, n_keys)
    log_a = more if rule.by_channel else of(length, heads)
    read, write = more if rule.erases else None, more if rule.has_write else None
    values, state = of(length, heads, n_values), of(heads, n_keys, n_values)
    return [keys, keys, values, log_a, read, write, state, of(length, dtype=jnp.bool_)]


def run(*args):
    *args, starts = args
    y, pull_back = jax.vjp(lambda *args: fused_delta_rule(*args, starts), *args)
    return y, pull_back(y)


@pytest.mark.grid
@pytest.mark.parametrize("name", RULES)
def test_lowers_to_one_kernel_each_way(name):
    traced = jax.jit(run).trace(*shapes(name, 100, 4, 96, 192))
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 2


@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("head", (100, 4, 96, 192)), ("channel", (256, 4, 128, 128)), ("write", (100, 2, 64, 64))],
)
def test_mosaic_compiles_it_for_a_tpu(target, name, sizes, monkeypatch):
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    from hyena_jax.plan.compiling import ENVIRONMENT
    from hyena_jax.plan.step import compile_only_devices

    for variable, value in ENVIRONMENT.items():  # several workers may load libtpu
        monkeypatch.setenv(variable, value)
    device = SingleDeviceSharding(compile_only_devices(parse_target(target))[0])
    program = jax.jit(run).lower(*shapes(name, *sizes, sharding=device)).compile().as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.grid
@pytest.mark.parametrize("name", ["head", "channel"])
def test_its_cost_is_counted(name):
    """Every array crosses HBM once each way, and the memories between the chunks; keys once for each head."""
    length, heads, n_keys, n_values, chunk = 128, 4, 96, 192, 64
    forward, backward = kernels(jax.make_jaxpr(run)(*shapes(name, length, heads, n_keys, n_values)))
    tokens, states = 2 * heads * length, 2 * heads * n_keys * n_values
    decay = n_keys if name == "channel" else 1
    inputs = tokens * (3 * n_keys + n_values + decay)
    memories = length // chunk * states
    assert forward.hbm_bytes == 4 * (inputs + tokens * n_values + memories + 2 * states)
    assert backward.hbm_bytes == 4 * (2 * inputs + tokens * n_values + memories + 2 * states)
    # At least the multiply-adds of the chunked rule, in 6 passes; the backward pass recomputes them.
    least = 6 * 2 * tokens * (chunk * (n_keys + n_values) + 3 * n_keys * n_values)
    assert forward.work.products > least
    assert backward.work.products > 3 * least
