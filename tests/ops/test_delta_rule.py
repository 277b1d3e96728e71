"""The chunked gated delta rule equals its loop, and so do its gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from grid import in_grid
from tolerances import assert_close

from hyena_jax.ops.delta_rule import delta_rule, transfer, unit_triangular_inverse
from hyena_jax.reference.delta_rule import delta_rule as loop

compiled = jax.jit(delta_rule, static_argnames="chunk")
BATCH, HEADS, K, V = 2, 4, 5, 3


def arrays(length, n_updates=1, key_heads=2, most_beta=1.0, decay=0.3):
    """q, k of length 1, v, log_a, beta and the first memory, float64."""
    rng, rows = np.random.default_rng([length, n_updates]), (BATCH, n_updates * length)
    k = rng.standard_normal((*rows, key_heads, K))
    return (
        rng.standard_normal((BATCH, length, key_heads, K)),
        k / np.linalg.norm(k, axis=-1, keepdims=True),
        rng.standard_normal((*rows, HEADS, V)),
        -rng.exponential(decay, (BATCH, length, HEADS)),
        rng.uniform(0, most_beta, (*rows, HEADS)),
        rng.standard_normal((BATCH, HEADS, K, V)),
    )


def some_starts(length):
    return np.random.default_rng(length).random((BATCH, length)) < 0.1


def in_float32(args):
    return [None if x is None else np.float32(x) for x in args]


def check(args, starts=None, chunk=64):
    """Values in float32."""
    expected = loop(*args, np.zeros(args[3].shape[:2], bool) if starts is None else starts)
    for actual, x in zip(compiled(*in_float32(args), starts, chunk=chunk), expected, strict=True):
        assert_close(actual, x)


@pytest.mark.parametrize("chunk", [16, *in_grid(1, 7, 64, 128, 256)])
@pytest.mark.parametrize("length", [127, *in_grid(1, 7, 64)])
@pytest.mark.parametrize(
    ("n_updates", "key_heads", "most_beta", "has_starts"),
    [
        (1, 2, 1.0, False),
        (3, 4, 2.0, True),
        (1, 1, None, True),
        pytest.param(2, 2, None, False, marks=pytest.mark.grid),
    ],
)
def test_equals_the_loop(length, chunk, n_updates, key_heads, most_beta, has_starts):
    *args, beta, state = arrays(length, n_updates, key_heads, most_beta or 1.0)
    starts = some_starts(length) if has_starts else None
    check((*args, beta if most_beta else None, state), starts, chunk)


@pytest.mark.parametrize(
    ("n_updates", "most_beta"), [(2, 2.0), pytest.param(1, None, marks=pytest.mark.grid)]
)
def test_gradients_equal_central_differences_of_the_loop(n_updates, most_beta):
    length, rng = 13, np.random.default_rng(0)
    *args, beta, state = arrays(length, n_updates, 2, most_beta or 1.0)
    args, starts = (*args, beta if most_beta else None, state), some_starts(length)
    weights = rng.standard_normal((BATCH, length, HEADS, V)), rng.standard_normal(state.shape)

    def loss(f, args, starts):
        return sum((w * x).sum() for w, x in zip(weights, f(*args, starts), strict=True))

    with jax.enable_x64(True):
        gradients = jax.jit(jax.grad(lambda args: loss(partial(delta_rule, chunk=4), args, starts)))(args)
    for i, gradient in enumerate(jax.device_get(gradients)):
        if gradient is None:
            continue
        direction, moved = rng.standard_normal(args[i].shape), []
        for step in (1e-6, -1e-6):
            moved.append(loss(loop, (*args[:i], args[i] + step * direction, *args[i + 1 :]), starts))
        expected = (moved[0] - moved[1]) / 2e-6
        assert np.sum(gradient * direction) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.grid
@pytest.mark.parametrize("has_beta", [False, True])
def test_derivatives_in_both_modes(has_beta):
    *args, beta, state = arrays(7, 2)

    def f(args):
        return delta_rule(*args[:4], args[4] if has_beta else None, args[5], some_starts(7), chunk=3)

    with jax.enable_x64(True):
        check_modes(f, (*args, beta, state), is_thorough=True)


@pytest.mark.parametrize(("beta", "chunk"), [(0.5, 64), (1.0, 64), (1.9, 16)])
def test_equal_keys(beta, chunk):
    """And values, as in a row of equal bits. A product (I - M) (I + M^2) ... is wrong by 1e5 to 1e20 here."""
    q, k, v, log_a, _, state = arrays(127)
    k, v = (np.broadcast_to(x[:, :1], x.shape) for x in (k, v))
    check((q, k, v, 0 * log_a, np.full(log_a.shape, beta), state), chunk=chunk)


@pytest.mark.parametrize("size", [64, *in_grid(1, 2, 7, 48, 127)])
def test_the_inverse_of_alternating_signs(size):
    """Twos below the diagonal make the inverse -2, 2, -2, ... there, and do not let rounding errors decay."""
    lower = np.float32(np.tril(np.full((size, size), 2), -1))
    i, j = np.indices((size, size))
    expected = np.where(i > j, 2.0 * (-1.0) ** (i - j), i == j)
    assert_close(jax.jit(unit_triangular_inverse)(lower), expected)


@pytest.mark.parametrize("decay", [1e3, 1e-3, *in_grid(1.0, 30.0)])
def test_a_strong_decay_in_the_middle_of_a_chunk(decay):
    """Weights of later tokens do not lose digits to it, as differences of running sums would."""
    q, k, v, log_a, beta, state = arrays(127, decay=0.01)
    log_a[:, ::9] = -decay
    check((q, k, v, log_a, beta, state))
    check((q, k, v, log_a, None, state))


@jax.jit
def gradients_of(args):
    def loss(args):
        o, state = delta_rule(*args)
        return (o**2).sum() + (state**2).sum()

    return jax.grad(loss)(args)


@pytest.mark.parametrize("log_a", [0.0, -1e-30, -20.0, -1e3, -1e30])
def test_gradients_are_finite_at_any_decay(log_a):
    """The exponential of a difference above the diagonal overflows from log a = -1.4 on."""
    args = in_float32(arrays(64))
    args[3] = np.full_like(args[3], log_a)
    for gradient in gradients_of(args):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("n_updates", [1, *in_grid(2)])
def test_strengths_of_up_to_2_do_not_diverge(n_updates):
    """Without decay and without values, nothing adds to the memory, and an update may only turn it."""
    q, k, v, log_a, _, state = in_float32(arrays(2048, n_updates))
    beta = np.random.default_rng(0).uniform(1.9, 2, (*k.shape[:2], HEADS)).astype(np.float32)
    _, last = compiled(q, k, 0 * v, 0 * log_a, beta, state)
    assert np.linalg.norm(last) <= np.linalg.norm(state)
    beta[:] = 2
    _, last = compiled(q, k, 0 * v, 0 * log_a, beta, state)
    np.testing.assert_allclose(np.linalg.norm(last), np.linalg.norm(state), rtol=1e-3)


def test_one_channel_without_erasing_is_the_linear_recurrence():
    """Each entry of a key is the input of one channel."""
    rng = np.random.default_rng(0)
    k, log_a = rng.standard_normal((2, 127, 1, 1)), -rng.exponential(1, (2, 127, 1))
    one = np.ones((2, 127, 1, 1), np.float32)
    o, _ = compiled(one, np.float32(k), one, np.float32(log_a), None, np.zeros((2, 1, 1, 1), np.float32))
    h, expected = np.zeros((2, 1)), []
    for t in range(127):
        h = np.exp(log_a[:, t]) * h + k[:, t, 0]
        expected.append(h)
    assert_close(o[..., 0], np.stack(expected, axis=1))


@pytest.mark.parametrize(
    ("n_updates", "has_beta"), [(2, True), pytest.param(1, False, marks=pytest.mark.grid)]
)
def test_transfers_compose(n_updates, has_beta):
    """Of three parts, of which the last starts a document: the memory after them, and the last outputs."""
    length, part = 21, 7
    args, starts = in_float32(arrays(length, n_updates)), np.zeros((BATCH, length), bool)
    starts[:, 15] = True
    q, k, v, log_a, beta, memory = args
    beta = beta if has_beta else None
    o, last = compiled(q, k, v, log_a, beta, memory, starts, chunk=4)
    maps = jax.jit(partial(transfer, chunk=4))
    for begin in range(0, length, part):
        rows = slice(begin * n_updates, (begin + part) * n_updates)
        tokens = slice(begin, begin + part)
        inputs = k[:, rows], v[:, rows], log_a[:, tokens], None if beta is None else beta[:, rows]
        factor, added = jax.device_get(maps(*inputs, starts[:, tokens]))
        before, memory = memory, factor @ memory + added
    assert_close(memory, np.asarray(last, np.float64))
    again, _ = compiled(q[:, tokens], *inputs, before, starts[:, tokens], chunk=4)
    assert_close(again, np.asarray(o, np.float64)[:, tokens])


def test_what_came_before_a_start_does_not_matter():
    q, k, v, log_a, beta, state = in_float32(arrays(31))
    starts = np.zeros((BATCH, 31), bool)
    starts[:, 20] = True
    o, last = compiled(q, k, v, log_a, beta, state, starts)
    v[:, :20], state[:] = 1e3, 1e3
    other, other_last = compiled(q, k, v, log_a, beta, state, starts)
    np.testing.assert_array_equal(other[:, 20:], o[:, 20:])
    np.testing.assert_array_equal(other_last, last)


def test_dtypes():
    """bfloat16 is summed in float32, and float64 stays."""
    args = arrays(127)
    half = [jnp.asarray(x, jnp.bfloat16) for x in args[:3]]
    o, last = compiled(*half, *map(np.float32, args[3:]))
    assert o.dtype == last.dtype == np.float32
    expected = loop(*args, np.zeros((BATCH, 127), bool))
    assert_close(o, expected[0], "bfloat16")
    with jax.enable_x64(True):
        for actual, x in zip(compiled(*args), expected, strict=True):
            assert_close(actual, x)
            assert actual.dtype == np.float64


def test_parity_by_hand():
    """A bit of 1 turns the sign of what the memory holds at the only key; 4,096 bits."""
    bits = np.random.default_rng(0).integers(0, 2, (1, 4096))
    one = np.ones((1, 4096, 1, 1), np.float32)
    log_a, beta, state = np.zeros((1, 4096, 1), np.float32), 2 * bits[..., None], np.ones((1, 1, 1, 1))
    o, _ = compiled(one, one, 0 * one, log_a, np.float32(beta), np.float32(state))
    np.testing.assert_array_equal(np.asarray(o)[0, :, 0, 0], 1 - 2 * (np.cumsum(bits) % 2))
