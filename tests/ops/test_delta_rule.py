"""The chunked delta rule equals its loop, and so do its gradients, in all forms that mixers use."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from differences import assert_equal_differences
from grid import in_grid, in_wide
from tolerances import assert_close

from hyena_jax.ops.delta_rule import delta_rule, transfer, unit_triangular_inverse
from hyena_jax.reference.delta_rule import delta_rule as loop

compiled = jax.jit(delta_rule, static_argnames="chunk")
BATCH, HEADS, K, V = 2, 4, 5, 3


class Rule(NamedTuple):
    """A call: updates n and queries m of a token, heads H of keys, and how it decays and erases."""

    n: int = 1
    m: int = 1
    heads: int = 2
    by_channel: bool = False
    erases: bool = True
    most_beta: float = 1.0
    has_write: bool = False


GATED_DELTA, MAMBA2 = Rule(), Rule(erases=False, heads=1)
PRODUCT = Rule(n=3, heads=4, most_beta=2.0)
KDA, RWKV7 = Rule(by_channel=True, most_beta=2.0), Rule(by_channel=True, heads=4, has_write=True)
MAMBA3 = Rule(n=2, m=2, erases=False)
# No mixer has these together, but the rule does.
ALL = Rule(n=2, m=3, by_channel=True, has_write=True)


class Inputs(NamedTuple):
    """The arguments of the rule, float64, keys of length 1."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_a: np.ndarray
    read: np.ndarray | None
    write: np.ndarray | None
    state: np.ndarray


def arrays(rule, length, decay=0.3):
    rng, rows = np.random.default_rng([length, rule.n]), (BATCH, rule.n * length)
    k = rng.standard_normal((*rows, rule.heads, K))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    of_values = np.repeat(k, HEADS // rule.heads, axis=2)
    beta = rng.uniform(0, rule.most_beta, of_values.shape[:3])[..., None] if rule.erases else None
    read, write = None if beta is None else beta * of_values, None
    if rule.has_write:  # erased with a strength below 1 for each channel
        read, write = of_values, rng.uniform(0, 1, of_values.shape) * of_values
    return Inputs(
        q=rng.standard_normal((BATCH, rule.m * length, rule.heads, K)),
        k=k,
        v=rng.standard_normal((*rows, HEADS, V)),
        log_a=-rng.exponential(decay, (BATCH, length, HEADS, *[K] * rule.by_channel)),
        read=read,
        write=write,
        state=rng.standard_normal((BATCH, HEADS, K, V)),
    )


def some_starts(length):
    return np.random.default_rng(length).random((BATCH, length)) < 0.1


def in_float32(inputs):
    return Inputs(*(None if x is None else np.float32(x) for x in inputs))


def check(inputs, starts=None, chunk=64):
    """Values in float32. Without starts these are all False, as programs with starts are compiled anyway."""
    starts = np.zeros(inputs.log_a.shape[:2], bool) if starts is None else starts
    expected = loop(*inputs, starts)
    for actual, x in zip(compiled(*in_float32(inputs), starts, chunk=chunk), expected, strict=True):
        assert_close(actual, x)


@pytest.mark.parametrize("chunk", [64, *in_grid(1, 7, 16, 128, 256)])
@pytest.mark.parametrize("length", [149, *in_grid(1, 7, 64)])
@pytest.mark.parametrize(
    "rule",
    [
        *(GATED_DELTA, PRODUCT, KDA, RWKV7, MAMBA3),
        *in_grid(MAMBA2, ALL, ALL._replace(has_write=False), ALL._replace(erases=False, has_write=False)),
    ],
)
def test_equals_the_loop(length, chunk, rule):
    check(arrays(rule, length), some_starts(length), chunk)


def weighted_sum(f, weights, inputs, starts):
    return sum((w * x).sum() for w, x in zip(weights, f(*inputs, starts), strict=True))


@jax.jit
def gradients_of(weights, inputs, starts):
    return jax.grad(weighted_sum, 2)(partial(delta_rule, chunk=4), weights, inputs, starts)


@pytest.mark.parametrize("rule", [ALL, GATED_DELTA, *in_grid(PRODUCT, MAMBA2, KDA, MAMBA3)])
def test_gradients_equal_central_differences_of_the_loop_and_are_finite_at_any_decay(rule):
    """The exponential of a difference above the diagonal overflows, in float64 from log a = -237 on."""
    length, rng = 13, np.random.default_rng(0)
    inputs, starts = arrays(rule, length), some_starts(length)
    weights = [rng.standard_normal(x.shape) for x in loop(*inputs, starts)]
    with jax.enable_x64(True):
        gradients = jax.device_get(gradients_of(weights, inputs, starts))
        for log_a in (0.0, -1e-30, -20.0, -1e3, -1e30):
            extreme = inputs._replace(log_a=np.full_like(inputs.log_a, log_a))
            for gradient in jax.tree.leaves(gradients_of(weights, extreme, starts)):
                assert np.isfinite(gradient).all()
    assert_equal_differences(
        gradients, lambda *inputs: weighted_sum(loop, weights, inputs, starts), tuple(inputs)
    )


@pytest.mark.grid
@pytest.mark.parametrize("rule", [PRODUCT, MAMBA3, ALL])
def test_derivatives_in_both_modes(rule):
    inputs = arrays(rule, 7)

    def f(some):
        return delta_rule(*inputs._replace(**some), some_starts(7), chunk=4)

    with jax.enable_x64(True):
        check_modes(f, {name: x for name, x in inputs._asdict().items() if x is not None}, is_thorough=True)


@pytest.mark.parametrize("rule", [KDA, *in_wide(GATED_DELTA)])
@pytest.mark.parametrize(
    ("beta", "chunk"), [(0.5, 64), (1.0, 64), pytest.param(1.9, 16, marks=pytest.mark.wide)]
)
def test_equal_keys(beta, chunk, rule):
    """And values, as in a row of equal bits. A product (I - M) (I + M^2) ... is wrong by 1e5 to 1e20 here."""
    inputs = arrays(rule, 149)
    k, v = (np.broadcast_to(x[:, :1], x.shape) for x in (inputs.k, inputs.v))
    read = beta * np.repeat(k, HEADS // rule.heads, axis=2)
    check(inputs._replace(k=k, v=beta * v, read=read, log_a=0 * inputs.log_a), chunk=chunk)


@pytest.mark.parametrize("size", [64, *in_grid(1, 2, 7, 48, 127)])
def test_the_inverse_of_alternating_signs(size):
    """Twos below the diagonal make the inverse -2, 2, -2, ... there, and do not let rounding errors decay."""
    lower = np.float32(np.tril(np.full((size, size), 2), -1))
    i, j = np.indices((size, size))
    expected = np.where(i > j, 2.0 * (-1.0) ** (i - j), i == j)
    assert_close(jax.jit(unit_triangular_inverse)(lower[None])[0], expected)


@pytest.mark.parametrize("rule", [GATED_DELTA, KDA, RWKV7, *in_grid(MAMBA2)])
@pytest.mark.parametrize("decay", [1e3, *in_wide(1e-3), *in_grid(1.0, 30.0)])
def test_a_strong_decay_in_the_middle_of_a_chunk(decay, rule):
    """Weights of later tokens do not lose digits to it, as differences of running sums would."""
    inputs = arrays(rule, 149, decay=0.01)
    inputs.log_a[:, ::9] = -decay
    check(inputs)


@pytest.mark.parametrize("rule", [KDA, *in_grid(RWKV7)])
@pytest.mark.parametrize("least", [1e-6, *in_grid(1e-30, 0.1, 0.5)])
def test_decays_of_each_channel_from_next_to_nothing_to_next_to_1(least, rule):
    inputs = arrays(rule, 149)
    a = np.exp(np.random.default_rng(0).uniform(np.log(least), np.log1p(-1e-6), inputs.log_a.shape))
    check(inputs._replace(log_a=np.log(a)))


@pytest.mark.grid
@pytest.mark.parametrize("by_channel", [False, True])
def test_one_decay_or_read_for_all_values_of_a_key(by_channel):
    """`log_a`, `read` and `write` may have the heads of the keys."""
    inputs = in_float32(arrays(Rule(by_channel=by_channel, has_write=True), 21))
    of_keys = {name: getattr(inputs, name)[:, :, ::2] for name in ("log_a", "read", "write")}
    same = inputs._replace(**{name: np.repeat(x, 2, axis=2) for name, x in of_keys.items()})
    for actual, expected in zip(compiled(*inputs._replace(**of_keys)), compiled(*same), strict=True):
        assert_close(actual, np.asarray(expected, np.float64))


@pytest.mark.parametrize("rule", [MAMBA2, *in_grid(ALL, PRODUCT, KDA, MAMBA3)])
def test_transfers_compose(rule):
    """Of three parts, of which the last starts a document: the memory after them, and the last outputs."""
    length, part = 21, 7
    inputs, starts = in_float32(arrays(rule, length)), np.zeros((BATCH, length), bool)
    starts[:, 15] = True
    o, last = compiled(*inputs, starts, chunk=4)
    maps, memory = jax.jit(partial(transfer, chunk=4)), inputs.state
    for begin in range(0, length, part):
        tokens = slice(begin, begin + part)
        rows, queries = (slice(n * begin, n * (begin + part)) for n in (rule.n, rule.m))
        some = Inputs(
            inputs.q[:, queries],
            *(None if x is None else x[:, rows] for x in (inputs.k, inputs.v)),
            inputs.log_a[:, tokens],
            *(None if x is None else x[:, rows] for x in (inputs.read, inputs.write)),
            memory,
        )
        factor, added = jax.device_get(maps(*some[1:6], starts[:, tokens]))
        memory = factor @ memory + added
    assert_close(memory, np.asarray(last, np.float64))
    again, _ = compiled(*some, starts[:, tokens], chunk=4)
    assert_close(again, np.asarray(o, np.float64)[:, queries])


def test_dtypes():
    """bfloat16 is summed in float32, and float64 stays."""
    inputs = arrays(GATED_DELTA, 127)
    half = {name: jnp.asarray(getattr(inputs, name), jnp.bfloat16) for name in ("q", "k", "v", "read")}
    o, last = compiled(*in_float32(inputs)._replace(**half))
    assert o.dtype == last.dtype == np.float32
    expected = loop(*inputs, np.zeros((BATCH, 127), bool))
    assert_close(o, expected[0], "bfloat16")
    with jax.enable_x64(True):
        for actual, x in zip(compiled(*inputs), expected, strict=True):
            assert_close(actual, x)
            assert actual.dtype == np.float64
