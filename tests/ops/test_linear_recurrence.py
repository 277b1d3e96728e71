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

METHODS = (scan_recurrence, loop_recurrence, associative_recurrence, None)
# Compiled as a whole, since the associative form would otherwise be hundreds of small programs.
linear_recurrence = jax.jit(ops.linear_recurrence, static_argnames=("reverse", "method"))
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True])


def arrays(length: int, batch: int = 2, channels: int = 3, seed: int = 0):
    """a in (-1, 1), x and h0, float64."""
    rng = np.random.default_rng(seed)
    a = rng.uniform(-1, 1, (batch, length, channels))
    return a, rng.standard_normal((batch, length, channels)), rng.standard_normal((batch, channels))


def loop(a, x, h0, reverse):
    """The definition as plain code, for JAX to differentiate."""
    h = [None] * x.shape[1]
    for t in reversed(range(len(h))) if reverse else range(len(h)):
        h0 = h[t] = a[:, t] * h0 + x[:, t]
    return jnp.stack(h, axis=1), h0


@DIRECTIONS
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [127, *in_grid(1, 2, 7, 64)])
def test_equals_the_definition(length, method, reverse):
    args = arrays(length)
    h, last = linear_recurrence(*map(np.float32, args), reverse, method)
    expected, expected_last = recurrence.linear_recurrence(*args, reverse)
    assert_close(h, expected)
    assert_close(last, expected_last)


@DIRECTIONS
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("shape", "has_start"), [((1, 1, 1), True), ((13, 3, 5), False)])
def test_equals_the_definition_in_float64(shape, has_start, method, reverse):
    with jax.enable_x64(True):
        a, x, h0 = arrays(*shape)
        h, last = linear_recurrence(a, x, h0 if has_start else None, reverse, method)
    assert h.dtype == last.dtype == jnp.float64
    expected, expected_last = recurrence.linear_recurrence(a, x, has_start * h0, reverse)
    assert_close(h, expected)
    assert_close(last, expected_last)


@DIRECTIONS
@pytest.mark.parametrize("method", [None, *in_wide(associative_recurrence), *in_grid(*METHODS[:2])])
@pytest.mark.parametrize("length", [17, *in_grid(1, 7)])
def test_gradients_equal_plain_autodiff_of_the_loop(length, method, reverse):
    with jax.enable_x64(True):
        args = tuple(map(jnp.asarray, arrays(length)))
        weight, last_weight, _ = arrays(length, seed=1)

        def loss(run, *args):
            h, last = run(*args)
            return (weight * h).sum() + (last_weight[:, 0] * last**2).sum()

        def gradients(run):
            return jax.jit(jax.grad(lambda *args: loss(run, *args), (0, 1, 2)))(*args)

        ours = gradients(lambda *args: linear_recurrence(*args, reverse, method))
        for a, b in zip(ours, gradients(lambda *args: loop(*args, reverse)), strict=True):
            assert_close(a, b)


@pytest.mark.grid
@DIRECTIONS
@pytest.mark.parametrize("method", METHODS[:-1])
@pytest.mark.parametrize("length", [7, 1])
def test_derivatives_in_both_modes(length, method, reverse):
    with jax.enable_x64(True):
        check_modes(lambda args: linear_recurrence(*args, reverse, method), arrays(length), is_thorough=True)


@pytest.mark.grid
@pytest.mark.parametrize("argument", [0, 1, 2])
def test_one_argument_alone_may_be_differentiated(argument):
    def f(moved):
        args = [jnp.asarray(x) for x in arrays(7)]
        args[argument] = moved
        return linear_recurrence(*args)

    with jax.enable_x64(True):
        check_modes(f, arrays(7)[argument], is_thorough=True)


@DIRECTIONS
@pytest.mark.parametrize("method", [None, *in_grid(*METHODS[:-1])])
def test_bfloat16_gradients(method, reverse):
    """a, x and their gradients are bfloat16; the state and the sums are float32."""
    a, x, h0 = arrays(37)
    a, x, h0 = a.astype(jnp.bfloat16), x.astype(jnp.bfloat16), np.float32(h0)

    def loss(run, *args):
        h, last = run(*args)
        return h.astype(last.dtype).sum() + (last**2).sum()

    run = partial(linear_recurrence, reverse=reverse, method=method)
    gradients = jax.jit(jax.grad(partial(loss, run), (0, 1, 2)))(a, x, h0)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    expected = jax.jit(jax.grad(partial(loss, partial(loop, reverse=reverse)), (0, 1, 2)))
    for g, b in zip(gradients, expected(np.float32(a), np.float32(x), h0), strict=True):
        assert_close(g, b, "bfloat16")


@pytest.mark.parametrize("method", METHODS)
def test_dtypes_may_differ(method):
    a, x, h0 = arrays(7)
    x, h0 = x.astype(jnp.bfloat16), h0.astype(jnp.bfloat16)
    h, last = linear_recurrence(np.float32(a), x, h0, method=method)
    assert (h.dtype, last.dtype) == (jnp.bfloat16, jnp.float32)
    expected = recurrence.linear_recurrence(a, np.float64(x), np.float64(h0))
    assert_close(h, expected[0])
    assert_close(last, expected[1])


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


@pytest.mark.parametrize("method", [associative_recurrence, *in_wide(scan_recurrence, loop_recurrence, None)])
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1.0, -1.0, np.nextafter(np.float32(1), np.float32(0))])
def test_is_finite_at_the_edges(factor, method):
    """Also where products of factors underflow, and with large inputs."""
    x = np.float32(1e30 * arrays(127)[1])
    a = np.full_like(x, factor)

    def loss(a, x):
        h, last = linear_recurrence(a, x, method=method)
        return (h * 1e-30).sum() + (last * 1e-30).sum(), h

    (_, h), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(a, x)
    for values in (h, *gradients):
        assert np.isfinite(values).all()
    assert_close(h, recurrence.linear_recurrence(a, x, np.zeros((2, 3)))[0])


@pytest.mark.parametrize("method", METHODS)
def test_future_inputs_have_exactly_no_gradient(method):
    a, x, h0 = map(np.float32, arrays(7))
    gradients = jax.grad(lambda a, x: linear_recurrence(a, x, h0, method=method)[0][:, 3].sum(), (0, 1))
    for gradient in jax.device_get(jax.jit(gradients)(a, x)):
        assert np.all(gradient[:, 4:] == 0)
        assert np.any(gradient[:, :4] != 0)


@pytest.mark.parametrize(
    ("a", "x", "h0", "message"),
    [
        ((2, 7, 3), (2, 6, 3), (2, 3), r"a is \(2, 7, 3\), x is \(2, 6, 3\)"),
        ((2, 0, 3), (2, 0, 3), (2, 3), "L >= 1"),
        ((2, 7, 3), (2, 7, 3), (2, 7, 3), r"h0 must be \[B, D\] = \(2, 3\)"),
    ],
)
def test_wrong_shapes_are_refused(a, x, h0, message):
    with pytest.raises(ValueError, match=message):
        linear_recurrence(jnp.zeros(a), jnp.zeros(x), jnp.zeros(h0))


def test_complex_factors_are_refused():
    """Their imaginary part would be lost."""
    x = jnp.zeros((1, 3, 2))
    with pytest.raises(ValueError, match="a and x must be real: a is complex64, x is float32"):
        linear_recurrence(jax.lax.complex(x, x), x)
