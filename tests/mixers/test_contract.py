"""The contract of every mixer. A new mixer needs a case in `cases`."""

from collections.abc import Callable
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, OPTIONS
from cases.case import Case, D
from derivative_modes import assert_trees_close, check_modes
from tolerances import DIFFERENCE_TOLERANCE, TOLERANCE, assert_close

from hyena_jax import mixers
from hyena_jax.config import MIXER_CONFIGS, UserError
from hyena_jax.mixers.long import has_tiles, map_histories
from hyena_jax.ops import long_conv, online_conv

LENGTHS = (1, 7, 64, 127)
OPTION_LENGTH = 31
EVERY = CASES | OPTIONS
MODES = (jax.jacfwd, jax.jacrev)
CAUSAL = {name: case for name, case in EVERY.items() if case.config.causal}
DECODED = {name: case for name, case in CAUSAL.items() if mixers.decodes_by_state(case.config)}
BIDIRECTIONAL = {name: case for name, case in EVERY.items() if not case.config.causal}


def marks(name, in_grid):
    """Marks that run all tests of a case in one process, so that they share the programs of `jitted`."""
    return [pytest.mark.xdist_group(name), *([pytest.mark.grid] if in_grid else [])]


def over(cases):
    """All cases and options."""
    return pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n, False)) for n in cases])


def over_cases(cases):
    """Cases, and options only under the marker `grid`."""
    return pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n, n in OPTIONS)) for n in cases])


def at_lengths(lengths):
    """Cases at every length; options at one, and at the others under the marker `grid`."""
    params = []
    for name in EVERY:
        for length in lengths if name in CASES else (OPTION_LENGTH, *lengths):
            in_grid = name in OPTIONS and length != OPTION_LENGTH
            params.append(pytest.param(name, length, marks=marks(name, in_grid), id=f"{name}-{length}"))
    return pytest.mark.parametrize(("name", "length"), params)


def build(case: Case, dtype=None):
    return mixers.mixer_class(case.config)(D, case.max_len, case.config, n_layers=1, dtype=dtype)


def inputs(length: int, seed: int = 0, batch: int = 2) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (batch, length, D), jnp.float32)


@cache
def init(name: str) -> dict:
    """Initial parameters, slightly perturbed, so that zeros do not hide mistakes."""
    with jax.enable_x64(False):  # the first test that asks may be one in float64
        params = jax.jit(build(EVERY[name]).init)(jax.random.key(0), inputs(3))["params"]
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        return structure.unflatten(
            [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
        )


def to_float64(tree):
    return jax.tree.map(lambda x: jnp.asarray(np.float64(x)), tree)


@cache
def jitted(name: str, method: str | None = None, dtype=None) -> Callable:
    """A method of the case's mixer as a function of parameters and arguments; compiled once per shape."""
    module = build(EVERY[name], dtype)
    return jax.jit(lambda params, *args: module.apply({"params": params}, *args, method=method))


def test_every_mixer_has_a_case():
    assert {type(case.config) for case in CASES.values()} == set(MIXER_CONFIGS.values())


@at_lengths(LENGTHS)
def test_equals_its_oracle(name, length):
    params, x = init(name), inputs(length)
    expected = EVERY[name].oracle(jax.device_get(params), np.asarray(x))
    assert_close(jitted(name)(params, x), expected)


@over(CASES)
def test_equals_its_oracle_in_float64(name):
    params, x = init(name), inputs(127)
    expected = EVERY[name].oracle(jax.device_get(params), np.asarray(x))
    with jax.enable_x64(True):
        y = jitted(name)(to_float64(params), to_float64(x))
    assert y.dtype == np.float64
    assert_close(y, expected)


@over(EVERY)
def test_gradients_equal_central_differences_of_the_oracle(name):
    with jax.enable_x64(True):
        args = (to_float64(init(name)), to_float64(inputs(7)))
        weight = np.random.default_rng(0).standard_normal((2, 7, D))
        grads = jax.jit(jax.grad(lambda *args: (weight * jitted(name)(*args)).sum(), (0, 1)))(*args)
        leaves, structure = jax.tree.flatten(jax.device_get(args))
        rng = np.random.default_rng(1)
        for i, grad in enumerate(jax.tree.leaves(grads)):
            direction = rng.standard_normal(leaves[i].shape)
            moved = []
            for sign in (1, -1):
                changed = [*leaves[:i], leaves[i] + sign * 1e-6 * direction, *leaves[i + 1 :]]
                moved.append((weight * EVERY[name].oracle(*structure.unflatten(changed))).sum())
            expected = (moved[0] - moved[1]) / 2e-6
            assert np.sum(grad * direction) == pytest.approx(
                expected, rel=DIFFERENCE_TOLERANCE, abs=DIFFERENCE_TOLERANCE
            )


def check_derivatives(name, length, is_thorough):
    module, args = build(EVERY[name]), (init(name), inputs(length))
    with jax.enable_x64(True):
        check_modes(lambda args: module.apply({"params": args[0]}, args[1]), args, is_thorough)


@over_cases(EVERY)
def test_derivatives_in_both_modes(name):
    check_derivatives(name, 7, is_thorough=False)


@pytest.mark.grid
@over(EVERY)
def test_derivatives_in_both_modes_of_long_sequences_and_many_at_once(name):
    check_derivatives(name, OPTION_LENGTH, is_thorough=True)


@pytest.mark.grid
@over(CASES)
def test_forward_jacobian_equals_the_reverse_one(name):
    with jax.enable_x64(True):
        params, x = to_float64(init(name)), to_float64(inputs(3, batch=1))
        jacobians = jax.jit(lambda x: [mode(lambda x: jitted(name)(params, x))(x) for mode in MODES])(x)
    assert_trees_close(*jacobians)


@over([name for name, case in CASES.items() if not case.exactly_causal])
def test_gradients_equal_those_of_the_direct_form(name, monkeypatch):
    module = build(EVERY[name])

    def loss(params, x):
        return (module.apply({"params": params}, x) ** 2).sum()

    with jax.enable_x64(True):
        args = (to_float64(init(name)), to_float64(inputs(EVERY[name].max_len)))
        grads = []
        for method in (long_conv.fft_conv, long_conv.direct_conv):
            monkeypatch.setattr(long_conv, "fft_conv", method)
            # A new lambda each time, or the second call would reuse the first trace.
            grads.append(jax.jit(jax.grad(lambda *args: loss(*args), (0, 1)))(*args))
        for ours, direct in zip(*map(jax.tree.leaves, grads), strict=True):
            np.testing.assert_allclose(ours, direct, rtol=1e-8, atol=1e-9 * np.abs(direct).max())


@over_cases(CAUSAL)
def test_is_causal(name):
    length = 127 if name in CASES else OPTION_LENGTH
    params, x = init(name), inputs(length)
    pullback = jax.jit(lambda x, weight: jax.vjp(lambda x: jitted(name)(params, x), x)[1](weight)[0])
    for t in {0, length // 2, length - 2}:
        gradient = pullback(x, jnp.zeros_like(x).at[:, t].set(1.0))
        future, past = np.abs(gradient[:, t + 1 :]), np.abs(gradient[:, : t + 1])
        assert past.max() > 0
        assert future.max() <= (0 if EVERY[name].exactly_causal else TOLERANCE["float32"] * past.max())


@over(BIDIRECTIONAL)
def test_what_reads_ahead_has_no_state(name):
    bound = build(EVERY[name]).bind({"params": init(name)})
    with pytest.raises(ValueError, match="must be causal to decode"):
        bound.init_state(1, 5)


@over(DECODED)
def test_prefill_and_steps_equal_the_parallel_form(name):
    check_decoding(name, 7, range(8) if name in CASES else (0, 3))


@over_cases(DECODED)
def test_prefill_and_steps_equal_the_parallel_form_of_long_sequences(name):
    check_decoding(name, 127, (1, 63, 126))


def check_decoding(name, length, splits):
    params, x = init(name), inputs(length)
    expected = jitted(name)(params, x)
    start = build(EVERY[name]).bind({"params": params}).init_state(2, length)
    prefill, step = jitted(name, "prefill"), jitted(name, "step")
    for split in splits:
        state, parts = start, []
        if split:
            state, y = prefill(params, state, x[:, :split])
            parts.append(y)
        for t in range(split, length):
            state, y = step(params, state, x[:, t])
            parts.append(y[:, None])
        assert_close(jnp.concatenate(parts, axis=1), expected)
        assert state.shared.position == length


def absorb(state, size):
    return map_histories(partial(online_conv.absorb, size=size), state)


@over_cases([name for name, case in DECODED.items() if hasattr(case.config, "filter")])
def test_steps_with_tiles_equal_the_parallel_form(name, monkeypatch):
    """After a ragged prefill; with tiles of few steps, so that there are many sizes."""
    monkeypatch.setattr(online_conv, "TILE", 2)
    params, x, lengths = init(name), inputs(OPTION_LENGTH), [3, 5]
    empty = build(EVERY[name]).bind({"params": params}).init_state(2, OPTION_LENGTH)
    state, _ = jitted(name, "prefill")(params, empty, x[:, :5], jnp.array(lengths))
    state, outputs = jax.jit(partial(map_histories, online_conv.open_tiles))(state), []
    step, end_tile = jitted(name, "step"), jax.jit(absorb, static_argnums=1)
    for n, t in enumerate(range(5, OPTION_LENGTH), start=1):
        state, y = step(params, state, x[:, t])
        outputs.append(y)
        if online_conv.due_size(n):
            state = end_tile(state, online_conv.due_size(n))
    outputs = jnp.stack(outputs, axis=1)
    for row, length in enumerate(lengths):
        expected = jitted(name)(params, x[row : row + 1, 5 - length :])[0, length:]
        assert_close(outputs[row], expected)
    # Back to no tiles: exact at any time, with room for a prefill.
    if has_tiles(state):
        assert np.isnan(step(params, absorb(state, 2), x[:, 0])[1]).all()
    closed = map_histories(online_conv.close_tiles, state)
    assert jax.tree.structure(closed) == jax.tree.structure(empty)


@over([name for name, case in CASES.items() if case.resets is None])
def test_document_boundaries_are_refused_where_they_would_leak(name):
    with pytest.raises(ValueError, match="segment_ids"):
        build(EVERY[name]).apply({"params": init(name)}, inputs(7), jnp.zeros((2, 7), jnp.int32))


@over_cases([name for name, case in EVERY.items() if case.resets])
def test_documents_equal_the_oracle_and_do_not_leak(name):
    params, x = init(name), inputs(OPTION_LENGTH)
    # The first id returns, which starts a separate document.
    ids = np.repeat([[0, 1, 0, 3], [5, 6, 6, 5]], [5, 1, 17, 8], axis=1)
    runs = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)
    run = jitted(name)
    y = run(params, x, jnp.asarray(ids))
    assert_close(y, EVERY[name].resets(jax.device_get(params), np.asarray(x), runs))
    np.testing.assert_array_equal(run(params, x.at[:, :6].set(9.0), jnp.asarray(ids))[:1, 6:], y[:1, 6:])


@over_cases(DECODED)
def test_decoding_in_float64_keeps_its_digits(name):
    with jax.enable_x64(True):
        params, x = to_float64(init(name)), to_float64(inputs(7))
        state = build(EVERY[name]).bind({"params": params}).init_state(2, 7)
        state, y = jitted(name, "prefill")(params, state, x[:, :6])
        _, last = jitted(name, "step")(params, state, x[:, 6])
        assert_close(jnp.concatenate([y, last[:, None]], axis=1), jitted(name)(params, x))


@over_cases(DECODED)
def test_rows_of_different_lengths_equal_separate_runs(name):
    """Also: a step after a ragged prefill, and a prefill after a step."""
    params, x, more = init(name), inputs(7), inputs(3, seed=5)
    prefill, step = jitted(name, "prefill"), jitted(name, "step")
    state = build(EVERY[name]).bind({"params": params}).init_state(2, 12)
    state, y = prefill(params, state, x, jnp.array([2, 5]))
    state, y_step = step(params, state, more[:, 0])
    state, y_more = prefill(params, state, more[:, 1:])
    for row, length in enumerate([2, 5]):
        alone = jnp.concatenate([x[row : row + 1, 7 - length :], more[row : row + 1]], axis=1)
        ours = jnp.concatenate([y[row, 7 - length :], y_step[row][None], y_more[row]])
        assert_close(ours, jitted(name)(params, alone)[0])


@over_cases(DECODED)
def test_state_leaves_start_with_the_batch(name):
    state = build(EVERY[name]).bind({"params": init(name)}).init_state(3, 11)
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(state._replace(shared=None)))


@over_cases(EVERY)
def test_bfloat16_is_close_and_has_finite_gradients(name):
    params, x = init(name), inputs(127)
    half = x.astype(jnp.bfloat16)
    y = jitted(name, dtype=jnp.bfloat16)(params, half)
    assert y.dtype == jnp.bfloat16
    assert_close(y, jitted(name)(params, x), "bfloat16")

    def loss(params, x):
        return (jitted(name, dtype=jnp.bfloat16)(params, x).astype(jnp.float32) ** 2).sum()

    promotion = "standard" if EVERY[name].through_library else "strict"
    with jax.numpy_dtype_promotion(promotion):
        grads = jax.jit(jax.grad(loss, (0, 1)))(params, half)
    assert all(np.isfinite(np.float32(leaf)).all() for leaf in jax.tree.leaves(grads))


@over_cases(DECODED)
def test_bfloat16_decoding_keeps_its_state_types(name):
    params = init(name)
    state = build(EVERY[name], jnp.bfloat16).bind({"params": params}).init_state(2, 7)
    x = inputs(1)[:, 0].astype(jnp.bfloat16)
    after, y = jitted(name, "step", jnp.bfloat16)(params, state, x)
    assert y.dtype == jnp.bfloat16
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )


@over(CASES)
def test_same_shapes_do_not_retrace(name):
    chex.clear_trace_counter()  # it counts by the function's code, which all mixers share
    module, params = build(EVERY[name]), init(name)
    once = chex.assert_max_traces(n=1)(lambda params, x: module.apply({"params": params}, x))
    forward = jax.jit(once)
    for seed in (0, 1):
        forward(params, inputs(7, seed))


@over(CASES)
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, D), "x must be of rank 3"),
        ((2, 5, D + 1), f"d_model={D}, got {D + 1}"),
        ((2, 128, D), "sequence length must be in 1..max_len=127, got 128"),
        ((2, 0, D), "sequence length must be"),
    ],
)
def test_wrong_inputs_are_refused_by_name(name, shape, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(build(EVERY[name]).init, jax.random.key(0), jnp.zeros(shape))


@over([name for name in CASES if name in DECODED])
def test_a_state_longer_than_the_model_is_refused(name):
    bound = build(EVERY[name]).bind({"params": init(name)})
    with pytest.raises(ValueError, match="max_len=127, got 128"):
        bound.init_state(1, 128)


@over([name for name in CASES if name in DECODED])
@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("step", [jnp.zeros((2, D + 1))], f"got .*{D + 1}|, got {D + 1}"),
        ("step", [jnp.zeros((3, D))], "got"),
        ("prefill", [jnp.zeros((3, 4, D))], "batch size must be the state's 2, got 3"),
        ("prefill", [jnp.zeros((2, 4, D)), jnp.zeros(3, jnp.int32)], "lengths.shape must be"),
    ],
)
def test_what_does_not_fit_the_state_is_refused_by_name(name, method, arguments, message):
    bound = build(EVERY[name]).bind({"params": init(name)})
    state = bound.init_state(2, 11)
    with pytest.raises(UserError, match=message):
        getattr(bound, method)(state, *arguments)


@over([name for name, case in CASES.items() if case.resets])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (jnp.zeros(7, jnp.int32), "segment_ids.shape must be"),
        (jnp.zeros((2, 6), jnp.int32), "segment_ids.shape must be"),
        (jnp.zeros((2, 7)), "segment_ids.dtype must be an integer type, got 'float32'"),
    ],
)
def test_wrong_segment_ids_are_refused_by_name(name, ids, message):
    with pytest.raises(UserError, match=message):
        build(EVERY[name]).apply({"params": init(name)}, inputs(7), ids)
