import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

from hyena_jax.ops import attention as ops
from hyena_jax.ops.attention import rotary, same_segment, softmax_attention, visible_until
from hyena_jax.reference import attention

local_attention = jax.jit(ops.local_attention, static_argnames="window")


def arrays(length: int, n_kv_heads: int = 4):
    """q [2, L, 4, 6], k and v with n_kv_heads heads."""
    rng = np.random.default_rng(length)
    return tuple(
        jnp.asarray(rng.standard_normal((2, length, n_heads, 6)), jnp.float32)
        for n_heads in (4, n_kv_heads, n_kv_heads)
    )


def one_segment(length: int) -> np.ndarray:
    return np.zeros((2, length))


@pytest.mark.parametrize("length", [1, 7, 64, 127])
def test_equals_the_definition(length):
    q, k, v = arrays(length)
    expected = attention.softmax_attention(q, k, v, one_segment(length))
    assert_close(softmax_attention(q, k, v, is_causal=True), expected)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_heads_of_keys_are_shared_by_neighbouring_heads(n_kv_heads, is_causal):
    q, k, v = arrays(7, n_kv_heads)
    expected = attention.softmax_attention(q, k, v, one_segment(7), is_causal)
    assert_close(softmax_attention(q, k, v, is_causal=is_causal), expected)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        q, k, v = map(jnp.float64, arrays(7, 2))
        segments = np.array([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
        y = softmax_attention(q, k, v, same_segment(jnp.asarray(segments)), is_causal=True)
        assert y.dtype == jnp.float64
        assert_close(y, attention.softmax_attention(q, k, v, segments))


def test_segments_do_not_see_each_other():
    q, k, v = arrays(7)
    segments = np.array([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
    y = softmax_attention(q, k, v, same_segment(jnp.asarray(segments)), is_causal=True)
    assert_close(y, attention.softmax_attention(q, k, v, segments))


def test_a_cache_shows_what_came_before():
    mask = visible_until(jnp.int32(2), n_queries=2, n_keys=5, first=jnp.array([0, 1]))
    expected = [[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], [[0, 1, 1, 0, 0], [0, 1, 1, 1, 0]]]
    np.testing.assert_array_equal(mask[:, 0], np.array(expected, bool))


@pytest.mark.parametrize("attend", [softmax_attention, local_attention])
def test_future_keys_have_exactly_no_gradient(attend):
    q, k, v = arrays(7)
    options = {"is_causal": True} if attend is softmax_attention else {"window": 2}
    gradient = jax.grad(lambda k, v: attend(q, k, v, **options)[:, 3].sum(), (0, 1))(k, v)
    for part in gradient:
        assert np.all(np.asarray(part)[:, 4:] == 0)


@pytest.mark.parametrize("window", [1, 4, 7, 100])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 17, 31])
def test_a_window_equals_the_definition(length, window):
    """Shorter than the window, a block exactly, and with a last block that is not full."""
    q, k, v = arrays(length, 2)
    expected = attention.softmax_attention(q, k, v, one_segment(length), window=window)
    assert_close(local_attention(q, k, v, window), expected)


@pytest.mark.parametrize("window", [4, 30])
def test_segments_do_not_see_each_other_in_a_window(window):
    q, k, v = arrays(31)
    # Ids that decrease, return nowhere, and one that is 0 like the padding of blocks.
    segments = np.repeat([[7, 5, 0, -3], [1, 2, 0, 4]], [5, 1, 17, 8], axis=1)
    y = local_attention(q, k, v, window, segment_ids=jnp.asarray(segments))
    assert_close(y, attention.softmax_attention(q, k, v, segments, window=window))


@pytest.mark.parametrize("window", [4, 30])
@pytest.mark.parametrize("n_before", [1, 3, 4])
def test_a_window_reaches_into_the_keys_before_the_queries(n_before, window):
    q, k, v = arrays(31, 1)
    expected = attention.softmax_attention(q, k, v, one_segment(31), window=window)[:, n_before:]
    if window == 30:
        assert_close(local_attention(q[:, n_before:], k, v, window), expected)
    else:  # what precedes the first query by more than the window is not needed
        start = max(n_before - window, 0)
        assert_close(local_attention(q[:, n_before:], k[:, start:], v[:, start:], window), expected)


@pytest.mark.parametrize("window", [4, 30])
def test_keys_that_are_not_real_are_seen_by_nobody(window):
    q, k, v = arrays(31)
    first = np.array([0, 6])
    real = jnp.arange(31) >= first[:, None]
    y = local_attention(q, k, v, window, real)
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
        with pytest.raises(ValueError, match=f"{n_queries}..{n_queries + 4}, got {n_keys}"):
            local_attention(q[:, :n_queries], k[:, :n_keys], v[:, :n_keys], 4)


@pytest.mark.parametrize("fraction", [0.0, 1 / 3, 2 / 3, 1.0])
def test_rotary_equals_the_definition(fraction):
    q, _, _ = arrays(64)
    expected = attention.rotary(q, fraction, 10_000.0)
    assert_close(rotary(q, jnp.arange(64), round(6 * fraction), 10_000.0), expected)


def test_rotary_products_depend_on_the_distance_alone():
    with jax.enable_x64(True):
        q, k, _ = map(jnp.float64, arrays(7))

        def logits(offset):
            turned = (rotary(z, offset + jnp.arange(7), 4, 100.0) for z in (q, k))
            return jnp.einsum("bthd,bshd->bhts", *turned)

        assert_close(logits(1000), logits(0))


def test_rotary_keeps_the_dtype_and_turns_in_float32():
    q, _, _ = arrays(7)
    positions = 5000 + jnp.arange(7)  # bfloat16 has no number between 5000 and 5024
    y = rotary(q.astype(jnp.bfloat16), positions, 6, 10_000.0)
    assert y.dtype == jnp.bfloat16
    assert_close(y, rotary(q, positions, 6, 10_000.0))
