import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

from hyena_jax.ops.attention import same_segment, softmax_attention, visible_until
from hyena_jax.reference import attention


def arrays(length: int):
    rng = np.random.default_rng(length)
    return tuple(jnp.asarray(rng.standard_normal((2, length, 3, 5)), jnp.float32) for _ in range(3))


@pytest.mark.parametrize("length", [1, 7, 64, 127])
def test_equals_the_definition(length):
    q, k, v = arrays(length)
    expected = attention.softmax_attention(q, k, v, np.zeros((2, length)))
    assert_close(softmax_attention(q, k, v, is_causal=True), expected)


def test_segments_do_not_see_each_other():
    q, k, v = arrays(7)
    segments = np.array([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
    y = softmax_attention(q, k, v, same_segment(jnp.asarray(segments)), is_causal=True)
    assert_close(y, attention.softmax_attention(q, k, v, segments))


def test_a_cache_shows_what_came_before():
    mask = visible_until(jnp.int32(2), n_queries=2, n_keys=5, first=jnp.array([0, 1]))
    expected = [[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], [[0, 1, 1, 0, 0], [0, 1, 1, 1, 0]]]
    np.testing.assert_array_equal(mask[:, 0], np.array(expected, bool))


def test_future_keys_have_exactly_no_gradient():
    q, k, v = arrays(7)
    gradient = jax.grad(lambda k, v: softmax_attention(q, k, v, is_causal=True)[:, 3].sum(), (0, 1))(k, v)
    for part in gradient:
        assert np.all(np.asarray(part)[:, 4:] == 0)
