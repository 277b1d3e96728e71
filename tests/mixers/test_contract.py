"""The contract of every mixer. A new mixer needs a case in `cases`."""

from collections.abc import Callable
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, OPTIONS, plugins
from cases.case import Case, D
from derivative_modes import check_modes
from differences import assert_equal_differences
from tolerances import TOLERANCE, assert_close

from hyena_jax import mixers
from hyena_jax.config import MIXER_CONFIGS
from hyena_jax.mixers.online import has_tiles, map_histories
from hyena_jax.ops import online_conv
from hyena_jax.system.errors import UserError

LENGTHS = (127, 1, 7, 64)
OPTION_LENGTH = 31
EVERY = CASES | OPTIONS
# The mixer of another case with other options: its slow tests run under the marker `grid` alone.
ALIKE = {"hyena_short", "hawk_griffin", "aft_full"}
CAUSAL = {name: case for name, case in EVERY.items() if case.config.causal}
DECODED = {name: case for name, case in CAUSAL.items() if mixers.decodes_by_state(case.config)}
BIDIRECTIONAL = {name: case for name, case in EVERY.items() if not case.config.causal}


def marks(name, in_grid):
    """Marks that run all tests of a case in one process, so that they share the programs of `jitted`."""
    return [pytest.mark.xdist_group(name), *([pytest.mark.grid] if in_grid else [])]


# The operators have these tests too; here one mixer with long filters, a recurrent one and attention.
OF_MANY_AT_ONCE = ("hyena", "hawk", "attention")


def over(cases, outside_grid=tuple(EVERY)):
    """Those outside the grid, and the others under the marker `grid` alone."""
    params = [pytest.param(name, marks=marks(name, name not in outside_grid)) for name in cases]
    return pytest.mark.parametrize("name", params)


def build(case: Case, dtype=None):
    module = case.module or mixers.mixer_class(case.config)
    return module(D, case.max_len, case.config, n_layers=1, dtype=dtype)


def inputs(length: int, seed: int = 0, batch: int = 2) -> np.ndarray:
    """In NumPy, as each slice and sum of JAX arrays of another shape would be compiled."""
    return np.random.default_rng(seed).standard_normal((batch, length, D)).astype(np.float32)


@cache
def init(name: str) -> dict:
    """Random parameters, since initial zeros hide mistakes; a plugin's stay near its initial ones."""
    with jax.enable_x64(False):  # the first test that asks may be one in float64
        module, rng = build(EVERY[name]), np.random.default_rng(1)
        args, of_plugin = (jax.random.key(0), inputs(3)), name in plugins.CASES
        start = jax.jit(module.init)(*args) if of_plugin else jax.eval_shape(module.init, *args)

        def drawn(leaf):
            noise = np.float32(0.15) * rng.standard_normal(leaf.shape, leaf.dtype)
            return leaf + noise if of_plugin else noise

        return jax.device_get(jax.tree.map(drawn, start.get("params", {})))


@pytest.fixture(autouse=True)
def _in_float64(request):
    """A user's mixer that casts to float32 fails in float64 with one line, not inside of JAX."""
    if "enable_x64" in request.function.__code__.co_names:
        fault = plugins.float64_fault(request.node.callspec.params.get("name"))
        if fault is not None:
            pytest.fail(fault, pytrace=False)


def to_float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@cache
def jitted(name: str, method: str | None = None, dtype=None) -> Callable:
    """A method of the case's mixer as a function of parameters and arguments; compiled once per shape."""
    module = build(EVERY[name], dtype)
    return jax.jit(lambda params, *args: module.apply({"params": params}, *args, method=method))


@cache
def with_gradients(name: str) -> Callable:
    """(params, x, weight) -> y, and the gradients of its product with the weight."""

    module = build(EVERY[name])

    def run(params, x, weight):
        y, pull_back = jax.vjp(lambda params, x: module.apply({"params": params}, x), params, x)
        return y, pull_back(weight)

    return jax.jit(run)


@cache
def begun(name: str) -> Callable:
    """(params, max_len, x, lengths) -> state and outputs of a first prefill, as one program."""
    module = build(EVERY[name])

    def run(params, max_len, x, lengths=None):
        bound = module.bind({"params": params})
        return bound.prefill(bound.init_state(len(x), max_len), x, lengths)

    return jax.jit(run, static_argnums=1)


def test_every_mixer_has_a_case():
    assert CASES.keys() >= ALIKE
    assert {type(case.config) for case in CASES.values()} == set(MIXER_CONFIGS.values())


@pytest.mark.wide
@over(EVERY, outside_grid=[name for name in CASES if CASES[name].resets is None])
def test_equals_its_oracle(name):
    """What knows documents has a test of these at the first length, outside of the grid."""
    for length in LENGTHS if name in CASES else (OPTION_LENGTH, *LENGTHS[:2]):
        params, x = init(name), inputs(length)
        assert_close(jitted(name)(params, x), EVERY[name].oracle(params, x))


@over(EVERY, outside_grid=CASES.keys() - ALIKE)
def test_equals_its_oracle_with_central_differences_in_float64(name):
    oracle = EVERY[name].oracle
    with jax.enable_x64(True):
        args = (to_float64(init(name)), to_float64(inputs(OPTION_LENGTH)))
        weight = np.random.default_rng(0).standard_normal((2, OPTION_LENGTH, D))
        y, grads = jax.device_get(with_gradients(name)(*args, weight))
    assert y.dtype == np.float64
    assert_close(y, oracle(*args))
    assert_equal_differences(grads, lambda *args: (weight * oracle(*args)).sum(), args)


@pytest.mark.grid
@over(CASES)
def test_derivatives_in_both_modes(name):
    is_thorough = name in OF_MANY_AT_ONCE
    module, args = build(EVERY[name]), (init(name), inputs(OPTION_LENGTH if is_thorough else 7))
    with jax.enable_x64(True):
        check_modes(lambda args: module.apply({"params": args[0]}, args[1]), args, is_thorough)


@over(CAUSAL, outside_grid=CASES.keys() - ALIKE)
def test_is_causal(name):
    length = OPTION_LENGTH
    with jax.enable_x64(True):
        args = (to_float64(init(name)), to_float64(inputs(length)))
        for t in {0, length // 2, length - 2}:
            weight = np.zeros_like(args[1])
            weight[:, t] = 1
            gradient = np.asarray(with_gradients(name)(*args, weight)[1][1])
            future, past = np.abs(gradient[:, t + 1 :]), np.abs(gradient[:, : t + 1])
            assert past.max() > 0
            assert future.max() <= (0 if EVERY[name].exactly_causal else TOLERANCE["float64"] * past.max())


@pytest.mark.grid
@over(BIDIRECTIONAL)
def test_what_reads_ahead_has_no_state(name):
    bound = build(EVERY[name]).bind({"params": init(name)})
    with pytest.raises(ValueError, match="must be causal to decode"):
        bound.init_state(1, 5)


@pytest.mark.grid
@over(DECODED)
def test_prefill_and_steps_equal_the_parallel_form(name):
    length = EVERY[name].max_len if name in CASES else OPTION_LENGTH
    params, x = init(name), inputs(length)
    expected = jitted(name)(params, x)
    start = jax.jit(lambda params: build(EVERY[name]).bind({"params": params}).init_state(2, length))(params)
    for split in (0, 3, length - 1):
        state, parts = start, []
        if split:
            state, y = jitted(name, "prefill")(params, state, x[:, :split])
            parts.append(y)
        for t in range(split, length):
            state, y = jitted(name, "step")(params, state, x[:, t])
            parts.append(y[:, None])
        assert_close(np.concatenate(jax.device_get(parts), axis=1), expected)
        assert state.shared.position == length


def absorb(state, size):
    return map_histories(partial(online_conv.absorb, size=size), state)


@over([name for name, case in DECODED.items() if hasattr(case.config, "filter")], outside_grid=["hyena"])
def test_steps_with_tiles_equal_the_parallel_form(name, monkeypatch):
    """After a ragged prefill; with tiles of few steps, so that there are many sizes."""
    monkeypatch.setattr(online_conv, "TILE", 2)
    params, x, lengths = init(name), inputs(OPTION_LENGTH), [3, 5]
    first, _ = begun(name)(params, OPTION_LENGTH, x[:, :5], np.array(lengths, np.int32))
    state, outputs = jax.jit(partial(map_histories, online_conv.open_tiles))(first), []
    step, end_tile = jitted(name, "step"), jax.jit(absorb, static_argnums=1)
    for n, t in enumerate(range(5, OPTION_LENGTH), start=1):
        state, y = step(params, state, x[:, t])
        outputs.append(y)
        if online_conv.due_size(n):
            state = end_tile(state, online_conv.due_size(n))
    outputs = np.stack(jax.device_get(outputs), axis=1)
    for row, length in enumerate(lengths):
        expected = EVERY[name].oracle(params, x[row : row + 1, 5 - length :])[0, length:]
        assert_close(outputs[row], expected)
    # Back to no tiles: exact at any time, with room for a prefill.
    if has_tiles(state):
        assert np.isnan(step(params, end_tile(state, 2), x[:, 0])[1]).all()
    closed = jax.eval_shape(partial(map_histories, online_conv.close_tiles), state)
    assert jax.tree.structure(closed) == jax.tree.structure(first)


@over([name for name, case in CASES.items() if case.resets is None])
def test_document_boundaries_are_refused_where_they_would_leak(name):
    with pytest.raises(ValueError, match="segment_ids"):
        jax.eval_shape(jitted(name), init(name), inputs(7), np.zeros((2, 7), np.int32))


@over([name for name, case in EVERY.items() if case.resets], outside_grid=CASES.keys() - ALIKE)
def test_documents_equal_the_oracle_and_do_not_leak(name):
    params, x = init(name), inputs(LENGTHS[0])
    # The first id returns, which starts a separate document.
    ids = np.repeat([[0, 1, 0, 3], [5, 6, 6, 5]], [21, 1, 73, 32], axis=1)
    run = jitted(name)
    y = np.asarray(run(params, x, ids))
    assert_close(y, EVERY[name].resets(params, x, ids))
    other = x.copy()
    other[:, :22] = 9
    np.testing.assert_array_equal(np.asarray(run(params, other, ids))[:1, 22:], y[:1, 22:])


@over([name for name in CASES if name in DECODED], outside_grid=["hyena", "hawk", "s4d"])
def test_decoding_in_float64_keeps_its_digits(name):
    with jax.enable_x64(True):
        params, x = to_float64((init(name), inputs(7)))
        state, y = begun(name)(params, 7, x[:, :6])
        _, last = jitted(name, "step")(params, state, x[:, 6])
    assert last.dtype == np.float64
    y = np.concatenate([y, np.asarray(last)[:, None]], axis=1)
    assert_close(y, EVERY[name].oracle(params, x))


@over(DECODED, outside_grid=CASES.keys() - ALIKE)
@pytest.mark.parametrize(("n_steps", "n_last"), [(24, 0), pytest.param(1, 3, marks=pytest.mark.grid)])
def test_rows_of_different_lengths_equal_separate_runs(name, n_steps, n_last):
    """Of the oracle: a ragged prefill, steps, and a last prefill.

    Then a state that grows has no room, or less than for a prefill: what is traced cannot be refused, so the
    outputs are not numbers.
    """
    params, x, more = init(name), inputs(7), inputs(n_steps + 2 * n_last + 1, seed=5)
    room, n_read = 7 + n_steps + n_last + (n_last > 0), 7 + n_steps + n_last
    state, y = begun(name)(params, room, x, np.array([2, 5], np.int32))
    parts = [y]
    for t in range(n_steps + (not n_last)):
        state, y = jitted(name, "step")(params, state, more[:, t])
        parts.append(y[:, None])
    for t in (n_steps, n_steps + n_last) if n_last else ():
        state, y = jitted(name, "prefill")(params, state, more[:, t : t + n_last])
        parts.append(y)
    ours, beyond = np.split(np.concatenate(jax.device_get(parts), axis=1), [n_read], axis=1)
    for row, length in enumerate([2, 5]):
        alone = np.concatenate([x[row : row + 1, 7 - length :], more[row : row + 1, : n_read - 7]], axis=1)
        assert_close(ours[row, 7 - length :], EVERY[name].oracle(params, alone)[0])
    is_unbounded = mixers.is_unbounded(EVERY[name].config)
    has_room = is_unbounded or not any(room in leaf.shape for leaf in jax.tree.leaves(state))
    assert (np.isfinite(beyond) == has_room).all()


@over(EVERY, outside_grid=OF_MANY_AT_ONCE)
def test_bfloat16_is_close_and_has_finite_gradients(name):
    params, x = init(name), inputs(127)
    half, run = x.astype(jnp.bfloat16), jitted(name, dtype=jnp.bfloat16)
    assert jax.eval_shape(run, params, half).dtype == jnp.bfloat16

    def loss(params, x):
        y = run(params, x)
        return (y.astype(jnp.float32) ** 2).sum(), y

    promotion = "standard" if EVERY[name].through_library else "strict"
    with jax.numpy_dtype_promotion(promotion):
        grads, y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, half)
    if not EVERY[name].is_sensitive:
        assert_close(y, EVERY[name].oracle(params, x), "bfloat16")
    assert np.isfinite(np.float32(y)).all()
    assert all(np.isfinite(np.float32(leaf)).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.grid
@over(DECODED)
def test_bfloat16_decoding_keeps_its_state_types_and_rows(name):
    params = init(name)
    bound = build(EVERY[name], jnp.bfloat16).bind({"params": params})
    state = jax.eval_shape(lambda: bound.init_state(2, 7))
    assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(state._replace(shared=None)))
    token = inputs(1)[:, 0].astype(jnp.bfloat16)
    after, y = jax.eval_shape(jitted(name, "step", jnp.bfloat16), params, state, token)
    assert y.dtype == jnp.bfloat16
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


@pytest.mark.grid
@over([name for name in EVERY if name not in plugins.CASES])
def test_parameters_are_float32_also_where_64_bits_are_the_default(name):
    with jax.enable_x64(True):
        params = jax.eval_shape(build(EVERY[name]).init, jax.random.key(0), inputs(3))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}


@pytest.mark.grid
@pytest.mark.parametrize("name", ["hyena_short_in_blocks", "attention", "hawk", "aft_simple"])
def test_lengths_may_be_of_any_integer_type(name):
    expected, *found = (
        begun(name)(init(name), 7, inputs(5), np.array([2, 5], dtype))
        for dtype in ("int32", "uint8", "int16")
    )
    for ours in found:
        chex.assert_trees_all_equal(expected, ours)


X = np.zeros((2, 7, D), np.float32)
WRONG = [
    ("__call__", [X[0]], "x must be of rank 3"),
    ("__call__", [np.zeros((2, 5, D + 1), np.float32)], f"d_model={D}, got {D + 1}"),
    ("__call__", [np.zeros((2, 128, D), np.float32)], "sequence length must be in 1..max_len=127, got 128"),
    ("__call__", [X[:, :0]], "sequence length must be"),
    ("__call__", [X[:0]], "batch size must be at least 1"),
    ("__call__", [X, np.zeros(7, np.int32)], "segment_ids"),
    ("__call__", [X, np.zeros((2, 6), np.int32)], "segment_ids"),
    ("__call__", [X, np.zeros((2, 7), np.float32)], "segment_ids"),
    ("init_state", [1, 128], "max_len=127, got 128"),
    ("step", [np.zeros((2, D + 1), np.float32)], f"got .*{D + 1}|, got {D + 1}"),
    ("step", [np.zeros((3, D), np.float32)], "got"),
    ("prefill", [np.zeros((3, 4, D), np.float32)], "batch size must be the state's 2, got 3"),
    ("prefill", [X, np.zeros(3, np.int32)], "lengths.shape must be"),
    ("prefill", [X, np.zeros(2)], "lengths.dtype must be an integer type"),
]


# The base class checks the arguments of all mixers.
@over(["hawk", *plugins.CASES])
@pytest.mark.parametrize(("method", "arguments", "message"), WRONG)
def test_what_does_not_fit_is_refused_by_name(name, method, arguments, message):
    if method != "__call__" and name not in DECODED:
        pytest.skip("has no state")
    bound = build(EVERY[name]).bind({"params": init(name)})

    def run():
        state = [bound.init_state(2, 11)] if method in ("prefill", "step") else []
        return getattr(bound, method)(*state, *arguments)

    with pytest.raises(UserError, match=message):
        jax.eval_shape(run)
