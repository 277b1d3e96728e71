"""Convolutions with few taps, in each form, equal their definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from grid import in_grid
from tolerances import assert_close

from hyena_jax.ops import few_taps
from hyena_jax.ops.few_taps import MAX_IN_WINDOWS, MAX_SUMMED, few_taps_conv, windowed_conv
from hyena_jax.reference import convolution

# The taps of each form.
FORMS = {"summed": MAX_SUMMED, "windows": 7, "most_in_windows": MAX_IN_WINDOWS, "fourier": 40}
compiled = jax.jit(few_taps_conv)


def arrays(length: int, n_taps: int, dtype=np.float32):
    """u [2, 3, 2, L], h [3, K] and skip [3]."""
    rng = np.random.default_rng(length)
    shapes = ((2, 3, 2, length), (3, n_taps), (3,))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def definition(u, h, skip, segment_ids=None):
    n_groups, width, batch, length = u.shape
    taps = np.float64(h)
    taps[:, 0] += skip
    rows = np.float64(u).transpose(0, 2, 1, 3).reshape(-1, width, length)
    ids = np.zeros((batch, length)) if segment_ids is None else segment_ids
    y = convolution.short_conv(rows, taps, np.zeros(width), np.tile(ids, (n_groups, 1)))
    return y.reshape(n_groups, batch, width, length).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [127, *in_grid(1, 64, 128)])
def test_equals_the_definition(length, form):
    u, h, skip = arrays(length, FORMS[form])
    y = compiled(u, h, skip)
    assert_close(y, definition(u, h, skip))
    half = compiled(u.astype(jnp.bfloat16), h, skip)
    assert half.dtype == jnp.bfloat16
    assert_close(half, y)


@pytest.mark.parametrize("form", ["windows", "fourier", *in_grid("summed", "most_in_windows")])
def test_more_taps_than_tokens_and_no_skip(form):
    u, h, skip = arrays(5, FORMS[form])
    assert_close(compiled(u, h), definition(u, h, 0 * skip))


@pytest.mark.parametrize("form", ["windows", *in_grid("summed", "fourier")])
def test_documents_do_not_mix(form):
    u, h, skip = arrays(31, FORMS[form])
    ids = np.repeat([[0, 1, 2, 3], [0, 1, 2, 3]], [5, 1, 17, 8], axis=1)
    assert_close(compiled(u, h, skip, ids), definition(u, h, skip, ids))


def test_derivatives_of_windows_in_both_modes():
    u, h, _ = arrays(19, 7)
    with jax.enable_x64(True):
        check_modes(lambda args: windowed_conv(*args), (u, h))


@pytest.mark.grid
@pytest.mark.parametrize("n_taps", [1, 2, MAX_SUMMED, MAX_SUMMED + 1, 8, MAX_IN_WINDOWS])
def test_a_later_input_has_exactly_no_influence(n_taps):
    u, h, _ = arrays(37, n_taps)
    other = u.copy()
    other[..., 19] += 1
    changed = np.flatnonzero(np.abs(compiled(u, h) - compiled(other, h)).max((0, 1, 2)))
    np.testing.assert_array_equal(changed, np.arange(19, min(19 + n_taps, 37)))


def test_prefills_and_steps_equal_the_definition():
    u, h, skip = arrays(11, 5)
    rows, filter = u.reshape(6, 2, 11), few_taps.with_skip(jnp.asarray(h), skip)
    prefill, step = (jax.jit(partial(run, filter)) for run in (few_taps.prefill, few_taps.step))
    state, parts = few_taps.empty(filter, 2, 6), []
    for run, t, end in [(step, 0, 1), (step, 1, 2), (prefill, 2, 10), (step, 10, 11)]:
        y, state = run(state, rows[..., t:end])
        parts.append(y)
    assert_close(np.concatenate(parts, axis=-1), definition(u, h, skip).reshape(6, 2, 11))


def test_float64_stays_float64():
    u, h, skip = arrays(31, 7, np.float64)
    with jax.enable_x64(True):
        y = compiled(u, h, skip)
        gradients = jax.eval_shape(lambda *args: jax.vjp(few_taps_conv, *args)[1](y), u, h, skip)
    assert_close(y, definition(u, h, skip))
    assert {gradient.dtype for gradient in gradients} == {np.dtype(np.float64)}


def test_the_number_of_taps_chooses_the_form():
    def primitives(n_taps):
        return str(jax.make_jaxpr(few_taps_conv)(*arrays(64, n_taps)))

    assert "dot_general" not in primitives(MAX_SUMMED)
    assert "dot_general" in primitives(MAX_SUMMED + 1)
    assert "fft" not in primitives(MAX_IN_WINDOWS)
    assert "fft" in primitives(MAX_IN_WINDOWS + 1)
