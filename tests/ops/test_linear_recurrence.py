import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from grid import in_grid, in_wide
from tolerances import assert_close

from hyena_jax.ops import linear_recurrence as ops
from hyena_jax.ops.linear_recurrence import associative_recurrence, loop_recurrence, scan_recurrence
from hyena_jax.reference import recurrence

pytestmark = pytest.mark.xdist_group("linear_recurrence")  # its tests share compiled programs

METHODS = (scan_recurrence, loop_recurrence, associative_recurrence)
# Compiled as a whole, since the associative form would otherwise be hundreds of small programs.
linear_recurrence = jax.jit(ops.linear_recurrence, static_argnames=("reverse", "method"))
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True])


def arrays(length: int, batch: int = 2, channels: int = 3):
    """a in (-1, 1), x, h0 and a weight for each output, float64."""
    rng = np.random.default_rng(0)
    shape, state = (batch, length, channels), (batch, channels)
    return rng.uniform(-1, 1, shape), *map(rng.standard_normal, (shape, state, shape, state))


@partial(jax.jit, static_argnums=(0, 1))
def results(method, reverse, a, x, h0, weight, last_weight):
    """h, the last h, and the gradients of their weighted sum with respect to a, x and h0."""
    outputs, pull_back = jax.vjp(lambda *args: ops.linear_recurrence(*args, reverse, method), a, x, h0)
    return *outputs, *pull_back((weight, last_weight))


def exact(a, x, h0, weight, last_weight, reverse=False):
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


def assert_all_close(actual, expected, dtype=None):
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, dtype)


@DIRECTIONS
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [127, *in_grid(1, 2, 7, 64)])
def test_values_and_gradients_equal_the_oracle(length, method, reverse):
    args = arrays(length)
    assert_all_close(results(method, reverse, *map(np.float32, args)), exact(*args, reverse))


@pytest.mark.parametrize("method", METHODS)
def test_future_inputs_have_exactly_no_gradient(method):
    a, x, h0, weight, last_weight = map(np.float32, arrays(127))
    weight[:, 64:] = 0
    _, _, *gradients, _ = results(method, False, a, x, h0, weight, 0 * last_weight)
    for gradient in gradients:
        assert not np.any(gradient[:, 64:])
        assert np.all(gradient[:, :64])


@DIRECTIONS
@pytest.mark.parametrize("method", [None, *in_grid(*METHODS)])
def test_without_a_first_state_in_float64(method, reverse):
    with jax.enable_x64(True):
        a, x, h0, weight, last_weight = arrays(13)
        run = jax.jit(
            lambda a, x: jax.vjp(lambda *args: linear_recurrence(*args, None, reverse, method), a, x)
        )
        outputs, pull_back = run(a, x)
        found = *outputs, *pull_back((weight, last_weight))
    assert {y.dtype for y in found} == {np.dtype(np.float64)}
    assert_all_close(found, exact(a, x, 0 * h0, weight, last_weight, reverse)[:-1])


@pytest.mark.grid
@DIRECTIONS
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [7, 1])
def test_derivatives_in_both_modes(length, method, reverse):
    with jax.enable_x64(True):
        check_modes(lambda args: linear_recurrence(*args, reverse, method), arrays(length)[:3], True)


@pytest.mark.parametrize("method", [None, *in_grid(*METHODS)])
@pytest.mark.parametrize("reverse", [True, *in_grid(False)])
def test_bfloat16_gradients(method, reverse):
    """a, x and their gradients are bfloat16; the state and the sums are float32."""
    a, x, h0, weight, last_weight = map(np.float32, arrays(37))
    a, x, weight = (v.astype(jnp.bfloat16) for v in (a, x, weight))
    found = results(method, reverse, a, x, h0, weight, last_weight)
    assert [v.dtype for v in found] == [jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16, jnp.float32]
    assert_all_close(found, exact(a, x, h0, weight, last_weight, reverse), "bfloat16")


@pytest.mark.parametrize("method", [None, *in_grid(*METHODS)])
def test_dtypes_may_differ(method):
    a, x, h0, *_ = arrays(7)
    x, h0 = x.astype(jnp.bfloat16), h0.astype(jnp.bfloat16)
    found = linear_recurrence(np.float32(a), x, h0, method=method)
    assert [y.dtype for y in found] == [jnp.bfloat16, jnp.float32]
    assert_all_close(found, recurrence.linear_recurrence(a, np.float64(x), np.float64(h0)))


def test_the_kernels_are_not_imported_unless_used():
    code = "import sys, hyena_jax.ops.rg_lru; print('jax.experimental.pallas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_input_is_summed_in_float32(method):
    a, x = np.ones((2, 1, 300, 1), jnp.bfloat16)
    h, last = linear_recurrence(a, x, method=method)
    assert h.dtype == jnp.bfloat16
    assert last.dtype == jnp.float32
    assert last == 300  # a sum of ones in bfloat16 stops at 256


@pytest.mark.parametrize("method", [associative_recurrence, *in_wide(scan_recurrence, loop_recurrence)])
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1.0, -1.0, np.nextafter(np.float32(1), np.float32(0))])
def test_is_finite_at_the_edges(factor, method):
    """Also where products of factors underflow, and with large inputs."""
    a, x, h0, weight, last_weight = map(np.float32, arrays(127))
    a, x = np.full_like(a, factor), 1e30 * x
    found = results(method, False, a, x, h0, 1e-30 * weight, 1e-30 * last_weight)
    assert all(np.isfinite(values).all() for values in found)
    assert_close(found[0], recurrence.linear_recurrence(a, x, h0)[0])


X = np.zeros((2, 7, 3), np.float32)


@pytest.mark.parametrize(
    ("a", "x", "h0", "message"),
    [
        (X, X[:, :6], None, r"a is \(2, 7, 3\), x is \(2, 6, 3\)"),
        (X[:, :0], X[:, :0], None, "L >= 1"),
        (X, X, X, r"h0 must be \[B, D\] = \(2, 3\)"),
        (np.complex64(X), X, None, "a and x must be real: a is complex64, x is float32"),
    ],
)
def test_wrong_shapes_and_complex_numbers_are_refused(a, x, h0, message):
    with pytest.raises(ValueError, match=message):
        linear_recurrence(a, x, h0)
