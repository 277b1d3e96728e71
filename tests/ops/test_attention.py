import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import in_grid, in_wide
from tolerances import DIFFERENCE_TOLERANCE, assert_close

from hyena_jax.ops import attention as ops
from hyena_jax.ops.attention import Visible, plain_attention
from hyena_jax.ops.fast.blocked_attention import blocked_attention
from hyena_jax.reference import attention

local_attention = jax.jit(ops.local_attention, static_argnames=("window", "method"))
softmax_attention = jax.jit(ops.softmax_attention, static_argnames="is_causal")
rotary = jax.jit(ops.rotary, static_argnums=(2, 3))


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


@pytest.mark.parametrize("length", [127, *in_grid(1, 7, 64)])
def test_equals_the_definition(length):
    q, k, v = arrays(length)
    expected = attention.softmax_attention(q, k, v, one_segment(length))
    assert_close(softmax_attention(q, k, v, is_causal=True), expected)


@pytest.mark.parametrize(
    ("n_kv_heads", "is_causal", "ids", "dtype"),
    [
        *((n, is_causal, one_segment(7), "float32") for n in (1, 2, 4) for is_causal in (True, False)),
        (4, True, DOCUMENTS, "float32"),
        (2, True, DOCUMENTS, "float64"),
    ],
)
def test_neighbouring_heads_share_keys_and_documents_are_apart(n_kv_heads, is_causal, ids, dtype):
    with jax.enable_x64(dtype == "float64"):
        q, k, v = (x.astype(dtype) for x in arrays(7, n_kv_heads))
        segments = None if ids is not DOCUMENTS else (ids, ids)
        y = softmax_attention(q, k, v, is_causal=is_causal, segment_ids=segments)
    assert y.dtype == dtype
    assert_close(y, attention.softmax_attention(q, k, v, ids, is_causal))


def test_the_keys_before_the_queries_are_seen():
    """As with a cache: all queries come after `offset` keys, which may be a traced number."""
    q, k, v = arrays(7)
    expected = attention.softmax_attention(q, k, v, one_segment(7))[:, 3:5]
    known = jax.jit(lambda *args: ops.softmax_attention(*args, True, 3))
    for y in (known(q[:, 3:5], k, v), softmax_attention(q[:, 3:5], k, v, True, np.int32(3))):
        assert_close(y, expected)


FORMS = {"plain": plain_attention, "blocks": partial(blocked_attention, block_rows=8, most_ranges=3)}
IDS = jnp.asarray(np.repeat([[7, 5, 0, -3], [1, 2, 0, 4]], [5, 1, 17, 8], axis=1))
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


def objective(form, visible):
    """A scalar function of q, k, v that weights all outputs differently, except queries without keys."""

    def weigh(q, k, v):
        o = form(q, k, v, visible)
        weights = jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape)
        return (weights * o**2).sum()

    return weigh


@pytest.mark.parametrize(
    ("case", "n_kv_heads"),
    [
        ("documents", 2),
        ("cache", 1),
        pytest.param("all", 4, marks=pytest.mark.wide),
        pytest.param("causal", 1, marks=pytest.mark.wide),
        pytest.param("window of documents", 2, marks=pytest.mark.grid),
        pytest.param("documents, not causal", 1, marks=pytest.mark.grid),
        pytest.param("cache at a number", 4, marks=pytest.mark.grid),
        pytest.param("window", 4, marks=pytest.mark.grid),
    ],
)
def test_blocks_equal_the_plain_form(case, n_kv_heads):
    """Values, and all gradients, at a prime length."""
    visible = Visible(**VISIBLE[case])
    q, k, v = arrays(31, n_kv_heads)
    if case.startswith("cache"):
        q = q[:, :23]
    sees = np.ones(q.shape[:2], bool)
    if case == "cache":  # query t is at position 4 + t; the second row starts at 6
        sees[1, :2] = False
    sees = sees[..., None, None]
    values, gradients = {}, {}
    for name, form in FORMS.items():

        def weigh(q, k, v, form=form):
            o = jnp.where(sees, form(q, k, v, visible), 0)
            return (jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape) * o**2).sum(), o

        gradients[name], values[name] = jax.jit(jax.grad(weigh, (0, 1, 2), has_aux=True))(q, k, v)
    assert_close(values["blocks"], values["plain"])
    for ours, expected in zip(gradients["blocks"], gradients["plain"], strict=True):
        assert_close(ours, expected)


@pytest.mark.parametrize(
    ("length", "block_rows"),
    [(1, 8), (7, 1), (7, 1000), (127, 32)]
    + [pytest.param(length, 8, marks=pytest.mark.grid) for length in (2, 8, 9, 127)],
)
def test_blocks_equal_the_definition(length, block_rows):
    q, k, v = arrays(length, 2)
    form = partial(blocked_attention, block_rows=block_rows)
    expected = attention.softmax_attention(q, k, v, one_segment(length))
    assert_close(jax.jit(form, static_argnums=3)(q, k, v, Visible(is_causal=True)), expected)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("form", "case"),
    [("blocks", "documents"), ("blocks", "window"), ("blocks", "all"), ("plain", "documents")],
)
def test_derivatives_in_both_modes_and_twice(form, case):
    """Against central differences in float64: gradient, jvp, and both orders of Hessian-vector products."""
    with jax.enable_x64(True):
        inputs = tuple(map(jnp.float64, arrays(31, 2)))
        f = jax.jit(objective(FORMS[form], Visible(**VISIBLE[case])))
        tangents = tuple(jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in inputs)
        gradient = jax.jit(jax.grad(f, (0, 1, 2)))

        def along(x, t, step=1e-6):
            return tuple(a + step * b for a, b in zip(x, t, strict=True))

        def against_differences(actual, g):
            back = along(inputs, tangents, -1e-6)
            difference = jax.tree.map(lambda a, b: (a - b) / 2e-6, g(*along(inputs, tangents)), g(*back))
            for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(difference), strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=DIFFERENCE_TOLERANCE * np.abs(b).max())

        jvp = jax.jit(lambda x, t: jax.jvp(f, x, t)[1])
        against_differences(jvp(inputs, tangents), f)
        dot = sum((a * b).sum() for a, b in zip(gradient(*inputs), tangents, strict=True))
        assert_close(dot, jvp(inputs, tangents))
        forward_over_reverse = jax.jit(lambda x, t: jax.jvp(gradient, x, t)[1])(inputs, tangents)
        against_differences(forward_over_reverse, gradient)
        reverse_over_forward = jax.jit(jax.grad(lambda x: jax.jvp(f, x, tangents)[1]))(inputs)
        for a, b in zip(reverse_over_forward, forward_over_reverse, strict=True):
            assert_close(a, b)


@pytest.mark.grid
def test_derivatives_of_blocks_are_batched():
    """`vmap` of a jvp and of a gradient, `linearize` and `jacfwd`."""
    f = objective(FORMS["blocks"], Visible(is_causal=True))
    rows = tuple(jnp.stack([x, x[::-1]]) for x in arrays(7, 2))
    zeros = tuple(jnp.zeros_like(x) for x in rows[1:])
    tangents = (jnp.cos(rows[0]), *zeros)
    each = [tuple(x[i] for x in rows) for i in range(2)]
    jvps = jax.jit(jax.vmap(lambda x, t: jax.jvp(f, x, t)[1]))(rows, tangents)
    gradients = jax.jit(jax.vmap(jax.grad(f)))(*rows)
    for i, x in enumerate(each):
        assert_close(gradients[i], jax.grad(f)(*x))
        assert_close(jvps[i], (jax.grad(f)(*x) * tangents[0][i]).sum())
    linear = jax.linearize(lambda q: f(q, *each[0][1:]), each[0][0])[1]
    assert_close(linear(tangents[0][0]), jvps[0])
    assert_close(jax.jacfwd(f)(*each[0]), gradients[0])


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("blocks", "bfloat16"), *(pytest.param(form, "float32", marks=pytest.mark.wide) for form in FORMS)],
)
def test_queries_that_see_nothing_are_finite(form, dtype):
    inputs = tuple(x.astype(jnp.dtype(dtype)) for x in arrays(31, 2))
    f = objective(FORMS[form], Visible(**VISIBLE["nothing"]))
    value, gradients = jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*inputs)
    tangent = jax.jit(lambda x: jax.jvp(f, x, x)[1])(inputs)
    for x in (value, tangent, *gradients):
        assert np.isfinite(np.float32(x)).all()


@pytest.mark.parametrize("case", ["causal", *in_wide("all")])
def test_large_logits_are_finite(case):
    q, k, v = arrays(31, 2)
    f = objective(FORMS["blocks"], Visible(**VISIBLE[case]))
    value, gradients = jax.jit(jax.value_and_grad(f, (0, 1, 2)))(1e4 * q, k, v)
    for x in (value, *gradients):
        assert np.isfinite(x).all()


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
    [
        ("reverse", None),
        ("forward", None),
        pytest.param("reverse", 300, marks=pytest.mark.grid),
        pytest.param("forward over reverse", None, marks=pytest.mark.grid),
    ],
)
def test_blocks_take_memory_in_proportion_to_the_length(mode, window):
    """At four times the length, memory grows four times; with the weights of all queries, 16 times."""

    def temporary(length):
        visible = Visible(True, window)
        f = objective(partial(blocked_attention, block_rows=32, most_ranges=2), visible)
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


@pytest.mark.parametrize("attend", [softmax_attention, local_attention])
def test_future_keys_have_exactly_no_gradient(attend):
    q, k, v = arrays(7)
    options = {"is_causal": True} if attend is softmax_attention else {"window": 2}
    gradient = jax.jit(jax.grad(lambda k, v: attend(q, k, v, **options)[:, 3].sum(), (0, 1)))
    for part in gradient(k, v):
        assert np.all(np.asarray(part)[:, 4:] == 0)


@pytest.mark.parametrize("window", [1, 4, 7, 100])
@pytest.mark.parametrize("length", [31, *in_grid(1, 2, 7, 8, 9, 17)])
def test_a_window_equals_the_definition(length, window):
    """Lengths below the window, of exactly one block, and with a partial last block."""
    q, k, v = arrays(length, 2)
    expected = attention.softmax_attention(q, k, v, one_segment(length), window=window)
    assert_close(local_attention(q, k, v, window), expected)


@pytest.mark.parametrize("window", [4, 30])
def test_segments_do_not_see_each_other_in_a_window(window):
    q, k, v = arrays(31)
    # Ids in any order, each in one run, one of them 0 like the padding of blocks.
    segments = np.repeat([[7, 5, 0, -3], [1, 2, 0, 4]], [5, 1, 17, 8], axis=1)
    y = local_attention(q, k, v, window, segment_ids=segments)
    assert_close(y, attention.softmax_attention(q, k, v, segments, window=window))


@pytest.mark.parametrize("window", [4, 30])
@pytest.mark.parametrize("n_before", [1, 3, 4])
def test_a_window_reaches_into_the_keys_before_the_queries(n_before, window):
    q, k, v = arrays(31, 1)
    expected = attention.softmax_attention(q, k, v, one_segment(31), window=window)[:, n_before:]
    if window == 30:
        assert_close(local_attention(q[:, n_before:], k, v, window), expected)
    else:  # keys more than a window before the first query are not needed
        start = max(n_before - window, 0)
        assert_close(local_attention(q[:, n_before:], k[:, start:], v[:, start:], window), expected)


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


@pytest.mark.parametrize("fraction", [0.0, 1 / 3, 2 / 3, 1.0])
def test_rotary_equals_the_definition(fraction):
    q, _, _ = arrays(64)
    expected = attention.rotary(q, fraction, 10_000.0)
    assert_close(rotary(q, np.arange(64), round(6 * fraction), 10_000.0), expected)


def test_scaled_rotary_positions_are_divided():
    q, _, _ = arrays(7)
    far = ops.rotary(q, 4 * np.arange(7), 6, 10_000.0, scaling=4.0)
    assert_close(far, rotary(q, np.arange(7), 6, 10_000.0))


def test_rotary_products_depend_on_the_distance_alone():
    with jax.enable_x64(True):
        q, k, _ = map(np.float64, arrays(7))

        def logits(offset):
            turned = (np.asarray(rotary(z, offset + np.arange(7), 4, 100.0)) for z in (q, k))
            return np.einsum("bthd,bshd->bhts", *turned)

        assert_close(logits(1000), logits(0))


def test_rotary_keeps_the_dtype_and_turns_in_float32():
    q, _, _ = arrays(7)
    positions = 5000 + np.arange(7)  # bfloat16 has no number strictly between 5000 and 5024
    y = rotary(q.astype(jnp.bfloat16), positions, 6, 10_000.0)
    assert y.dtype == jnp.bfloat16
    assert_close(y, rotary(q, positions, 6, 10_000.0))
