import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import in_grid, in_wide
from tolerances import assert_close

from hyena_jax.ops import attention as ops
from hyena_jax.ops.attention import Visible, plain_attention
from hyena_jax.ops.fast.blocked_attention import blocked_attention
from hyena_jax.reference import attention

local_attention = jax.jit(ops.local_attention, static_argnames=("window", "method"))
softmax_attention = jax.jit(ops.softmax_attention, static_argnames="is_causal")
rotary = jax.jit(ops.rotary, static_argnums=(2, 3), static_argnames="scaling")


def arrays(length: int, n_kv_heads: int = 4):
    """q [2, L, 4, 6], k and v with n_kv_heads heads."""
    rng = np.random.default_rng(length)
    return tuple(
        rng.standard_normal((2, length, n_heads, 6)).astype(np.float32)
        for n_heads in (4, n_kv_heads, n_kv_heads)
    )


def one_segment(length: int) -> np.ndarray:
    return np.zeros((2, length))


DOCUMENTS = np.array([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("n_kv_heads", "is_causal", "ids", "dtype"),
    [
        (1, False, one_segment(7), "float32"),
        (2, True, DOCUMENTS, "float64"),
        (4, True, one_segment(127), "float32"),
        *(
            pytest.param(*case, "float32", marks=pytest.mark.grid)
            for case in [(2, False, DOCUMENTS), *((4, True, one_segment(n)) for n in (1, 64))]
        ),
    ],
)
def test_neighbouring_heads_share_keys_and_documents_are_apart(n_kv_heads, is_causal, ids, dtype):
    with jax.enable_x64(dtype == "float64"):
        q, k, v = (x.astype(dtype) for x in arrays(ids.shape[1], n_kv_heads))
        segments = None if ids is not DOCUMENTS else (ids, ids)
        y = softmax_attention(q, k, v, is_causal=is_causal, segment_ids=segments)
    assert y.dtype == dtype
    assert_close(y, attention.softmax_attention(q, k, v, ids, is_causal))


def test_the_keys_before_the_queries_are_seen():
    """As with a cache: all queries come after `offset` keys, which may be a traced number."""
    q, k, v = arrays(7)
    expected = attention.softmax_attention(q, k, v, one_segment(7))[:, 3:5]

    @jax.jit
    def both(q, k, v, offset):
        return [ops.softmax_attention(q, k, v, True, n_before) for n_before in (3, offset)]

    for y in both(q[:, 3:5], k, v, np.int32(3)):
        assert_close(y, expected)


FORMS = {"plain": plain_attention, "blocks": partial(blocked_attention, block_rows=8, most_ranges=3)}
# In any order, each in one run, one of them 0 like the padding of blocks.
IDS = np.repeat(np.int32([[7, 5, 0, -3], [1, 2, 0, 4]]), [5, 1, 17, 8], axis=1)
VISIBLE = {
    "all": {},
    "causal": {"is_causal": True},
    "documents": {"is_causal": True, "segment_ids": (IDS, IDS)},
    "documents, not causal": {"segment_ids": (IDS, IDS)},
    "cache": {"is_causal": True, "offset": jnp.int32(4), "real": jnp.arange(31) >= jnp.array([[0], [6]])},
    "cache at a number": {"is_causal": True, "offset": 4},
    "window": {"is_causal": True, "window": 5},
    "window of documents": {"is_causal": True, "window": 9, "segment_ids": (IDS, IDS)},
    "nothing": {"real": jnp.zeros((1, 31), bool)},
}


def objective(form, case, sees=True):
    """A function of q, k, v: a sum that weights all outputs differently, and the outputs, 0 unless `sees`."""

    def weigh(q, k, v):
        o = jnp.where(sees, FORMS[form](q, k, v, Visible(**VISIBLE[case])), 0)
        weights = jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape)
        return (weights * o**2).sum(), o

    return weigh


@cache
def compiled(form, case):
    """The gradients of q, k and v, and the outputs; those of queries that see nothing are left out."""
    sees = np.ones((2, 23 if case.startswith("cache") else 31, 1, 1), bool)
    if case == "cache":  # query t is at position 4 + t; the second row starts at 6
        sees[1, :2] = False
    return jax.jit(jax.grad(objective(form, case, sees), (0, 1, 2), has_aux=True))


@pytest.mark.parametrize(
    ("case", "n_kv_heads"),
    [
        ("documents", 2),
        ("cache", 1),
        *(pytest.param(*case, marks=pytest.mark.wide) for case in [("all", 4), ("causal", 1)]),
        pytest.param("window of documents", 2, marks=pytest.mark.grid),
        pytest.param("documents, not causal", 1, marks=pytest.mark.grid),
        pytest.param("cache at a number", 4, marks=pytest.mark.grid),
        pytest.param("window", 4, marks=pytest.mark.grid),
    ],
)
def test_blocks_equal_the_plain_form(case, n_kv_heads):
    """Values, and all gradients, at a prime length."""
    q, k, v = arrays(31, n_kv_heads)
    if case.startswith("cache"):
        q = q[:, :23]
    plain, blocks = (compiled(form, case)(q, k, v) for form in FORMS)
    jax.tree.map(assert_close, blocks, plain)


@pytest.mark.parametrize("case", ["documents", *in_wide("all")])
def test_large_logits_are_finite(case):
    q, k, v = arrays(31, 2)
    found = compiled("blocks", case)(1e4 * q, k, v)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize(
    ("length", "block_rows"),
    [(1, 8), pytest.param(127, 32, marks=pytest.mark.wide)]
    + [pytest.param(*sizes, marks=pytest.mark.grid) for sizes in [(7, 1), (7, 1000), (2, 8), (8, 8), (9, 8)]],
)
def test_blocks_equal_the_definition(length, block_rows):
    q, k, v = arrays(length, 2)
    form = partial(blocked_attention, block_rows=block_rows)
    expected = attention.softmax_attention(q, k, v, one_segment(length))
    assert_close(jax.jit(form, static_argnums=3)(q, k, v, Visible(is_causal=True)), expected)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("blocks", "bfloat16"), *(pytest.param(form, "float32", marks=pytest.mark.wide) for form in FORMS)],
)
def test_queries_that_see_nothing_are_finite(form, dtype):
    inputs = tuple(x.astype(jnp.dtype(dtype)) for x in arrays(31, 2))
    f = objective(form, "nothing")

    @jax.jit
    def derivatives(*x):
        return jax.grad(f, (0, 1, 2), has_aux=True)(*x), jax.jvp(f, x, x)

    for x in jax.tree.leaves(derivatives(*inputs)):
        assert np.isfinite(np.float32(x)).all()


def test_the_softmax_of_bfloat16_is_computed_in_float32():
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays(127, 2))
    traced = jax.jit(FORMS["blocks"], static_argnums=3).trace(q, k, v, Visible(is_causal=True))
    # A CPU leaves out a rounding that is undone at once, other devices may not.
    assert {*re.findall(r"preferred_element_type=(\w+)", str(traced.jaxpr))} == {"float32"}
    y = traced.lower().compile()(q, k, v)
    assert y.dtype == jnp.bfloat16
    wide = (np.asarray(x, np.float64) for x in (q, k, v))
    # Summing 127 keys in bfloat16 alone would cause a much larger error.
    assert_close(y, attention.softmax_attention(*wide, one_segment(127)))


@pytest.mark.grid
@pytest.mark.parametrize(
    ("mode", "window"),
    [("reverse", None), ("forward", None), ("reverse", 300), ("forward over reverse", None)],
)
def test_blocks_take_memory_in_proportion_to_the_length(mode, window):
    """At four times the length, memory grows four times; with the weights of all queries, 16 times."""

    def temporary(length):
        attend = partial(blocked_attention, block_rows=32, most_ranges=2)

        def f(q, k, v):
            return (attend(q, k, v, Visible(True, window)) ** 2).sum()

        gradient = jax.grad(f, (0, 1, 2))
        run = {
            "reverse": gradient,
            "forward": lambda *x: jax.jvp(f, x, x),
            "forward over reverse": lambda *x: jax.jvp(gradient, x, x),
        }[mode]
        x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        return jax.jit(run).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary(2048) < 4.2 * temporary(512)


def test_local_attention_takes_any_form():
    q, k, v = arrays(31, 2)
    expected = attention.softmax_attention(q, k, v, one_segment(31), window=7)
    for form in FORMS.values():
        assert_close(local_attention(q, k, v, 7, method=form), expected)


@pytest.mark.parametrize("window", [1, 4, 100, *in_grid(7)])
@pytest.mark.parametrize("length", [31, *in_grid(1, 2, 7, 8, 9, 17)])
def test_a_window_equals_the_definition(length, window):
    """Lengths below the window, of exactly one block, and with a partial last block."""
    q, k, v = arrays(length, 2)
    expected = attention.softmax_attention(q, k, v, one_segment(length), window=window)
    assert_close(local_attention(q, k, v, window), expected)


@pytest.mark.parametrize("window", [4, 30])
def test_segments_do_not_see_each_other_in_a_window(window):
    q, k, v = arrays(31)
    y = local_attention(q, k, v, window, segment_ids=IDS)
    assert_close(y, attention.softmax_attention(q, k, v, IDS, window=window))


@pytest.mark.parametrize(("n_before", "window"), [(1, 4), (4, 4), (3, 30)])
def test_a_window_reaches_into_the_keys_before_the_queries(n_before, window):
    q, k, v = arrays(31, 1)
    expected = attention.softmax_attention(q, k, v, one_segment(31), window=window)[:, n_before:]
    assert_close(local_attention(q[:, n_before:], k, v, window), expected)


@pytest.mark.parametrize("window", [4, 30])
def test_keys_that_are_not_real_are_seen_by_nobody(window):
    q, k, v = arrays(31)
    first = np.array([0, 6])
    real = np.arange(31) >= first[:, None]
    y = np.asarray(local_attention(q, k, v, window, real))
    assert np.isfinite(y).all()
    for row, start in enumerate(first):
        alone = (z[row : row + 1, start:] for z in (q, k, v))
        expected = attention.softmax_attention(*alone, np.zeros((1, 31 - start)), window=window)
        assert_close(y[row, start:], expected[0])


def test_a_window_costs_no_more_than_two_blocks_of_keys_a_query():
    """No array is near L x L: the largest are the weights of L queries for 2 window keys."""
    length, window = 4096, 16
    q, k, v = (jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32) for _ in range(3))
    run = jax.value_and_grad(lambda *args: local_attention(*args, window).sum(), (0, 1, 2))
    memory = jax.jit(run).lower(q, k, v).compile().memory_analysis()
    weights = 2 * length * 2 * window * 4
    assert memory.temp_size_in_bytes < 8 * weights < length**2


def test_too_many_or_too_few_keys_are_refused():
    q, k, v = arrays(7)
    for n_queries, n_keys in ((7, 6), (2, 7)):
        with pytest.raises(ValueError, match=f"{n_queries} to {n_queries + 4} keys, got {n_keys}"):
            local_attention(q[:, :n_queries], k[:, :n_keys], v[:, :n_keys], 4)


@pytest.mark.parametrize("fraction", [0.0, 1 / 3, 1.0])
def test_rotary_equals_the_definition(fraction):
    q, _, _ = arrays(64)
    expected = attention.rotary(q, fraction, 10_000.0)
    assert_close(rotary(q, np.arange(64), round(6 * fraction), 10_000.0), expected)


def test_scaled_rotary_positions_are_divided():
    q, _, _ = arrays(64)
    far = rotary(q, 4 * np.arange(64), 6, 10_000.0, scaling=4.0)
    assert_close(far, rotary(q, np.arange(64), 6, 10_000.0))


def test_rotary_keeps_the_dtype_and_turns_in_float32():
    q, _, _ = arrays(64)
    positions = 5000 + np.arange(64)  # bfloat16 has no number strictly between 5000 and 5024
    y = rotary(q.astype(jnp.bfloat16), positions, 6, 10_000.0)
    assert y.dtype == jnp.bfloat16
    assert_close(y, rotary(q, positions, 6, 10_000.0))
