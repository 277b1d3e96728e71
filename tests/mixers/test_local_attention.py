"""Tests only for local attention: its ring buffer of keys, filled and read in pieces of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

from hyena_jax.config import LocalAttentionConfig
from hyena_jax.mixers import LocalAttention

D, LENGTH = 8, 31


def bound(window: int, dtype=None) -> LocalAttention:
    module = LocalAttention(D, LENGTH, LocalAttentionConfig(2, window=window), dtype=dtype)
    return module.bind(jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 3, D))))


@pytest.mark.parametrize("window", [1, 4, 100])
@pytest.mark.parametrize("pieces", [(2, 1, 3, 10, 1, 1, 13), (17, 1, 13)])
def test_pieces_of_any_size_equal_the_whole(pieces, window):
    """Pieces shorter and longer than the ring; the ones are steps. Row 1 starts late in the first piece."""
    module = bound(window)
    whole, prefill, step = (jax.jit(method) for method in (module.__call__, module.prefill, module.step))
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, D))
    n_padding = pieces[0] // 2
    state, y = prefill(
        module.init_state(2, LENGTH), x[:, : pieces[0]], jnp.array([pieces[0], pieces[0] - n_padding])
    )
    parts, position = [y], pieces[0]
    for size in pieces[1:]:
        if size == 1:
            state, y = step(state, x[:, position])
            y = y[:, None]
        else:
            state, y = prefill(state, x[:, position : position + size])
        parts.append(y)
        position += size
    y = jnp.concatenate(parts, axis=1)
    assert_close(y[0], whole(x)[0])
    assert_close(y[1, n_padding:], whole(x[1:, n_padding:])[0])


@pytest.mark.parametrize(("window", "max_len", "n_slots"), [(4, 31, 5), (4, 3, 3), (100, 31, 31)])
def test_the_state_holds_a_window_of_keys_in_the_activations_dtype(window, max_len, n_slots):
    state = bound(window, jnp.bfloat16).init_state(2, max_len)
    assert state.keys.shape == state.values.shape == (2, n_slots, 1, 4)
    assert state.keys.dtype == jnp.bfloat16


def test_a_key_beyond_the_window_has_exactly_no_influence():
    module = bound(4)
    x = jax.random.normal(jax.random.key(1), (1, LENGTH, D))
    gradient = jax.jit(jax.grad(lambda x: module(x)[:, 20].sum()))(x)
    seen = np.flatnonzero(np.abs(gradient[0]).max(axis=-1))
    np.testing.assert_array_equal(seen, np.arange(16, 21))
