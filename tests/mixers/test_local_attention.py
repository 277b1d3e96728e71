"""Tests only for local attention: its ring buffer of keys, filled and read in pieces of any size."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

from hyena_jax.config import LocalAttentionConfig
from hyena_jax.mixers import LocalAttention

D, LENGTH = 8, 31
X = np.random.default_rng(0).standard_normal((2, LENGTH, D)).astype(np.float32)


def mixer(window: int, dtype=None) -> LocalAttention:
    return LocalAttention(D, LENGTH, LocalAttentionConfig(2, window=window), dtype=dtype)


@cache
def init() -> dict:
    """The window has no parameters."""
    return jax.device_get(jax.jit(mixer(1).init)(jax.random.key(0), X[:1, :3]))


def bound(window: int, dtype=None) -> LocalAttention:
    return mixer(window, dtype).bind(init())


@pytest.mark.grid
@pytest.mark.parametrize("window", [4, 1, 100])
@pytest.mark.parametrize("pieces", [(2, 1, 3, 10, 1, 1, 13), (17, 1, 13)])
def test_pieces_of_any_size_equal_the_whole(pieces, window):
    """Pieces shorter and longer than the ring; the ones are steps. Row 1 starts late in the first piece."""
    module = bound(window)
    whole, prefill, step = (jax.jit(method) for method in (module.__call__, module.prefill, module.step))
    n_padding = pieces[0] // 2
    lengths = np.array([pieces[0], pieces[0] - n_padding], np.int32)
    state, y = prefill(jax.jit(lambda: module.init_state(2, LENGTH))(), X[:, : pieces[0]], lengths)
    parts, position = [np.asarray(y)], pieces[0]
    for size in pieces[1:]:
        if size == 1:
            state, y = step(state, X[:, position])
            y = np.asarray(y)[:, None]
        else:
            state, y = prefill(state, X[:, position : position + size])
        parts.append(np.asarray(y))
        position += size
    y = np.concatenate(parts, axis=1)
    assert_close(y[0], np.asarray(whole(X[:1]))[0])
    assert_close(y[1, n_padding:], np.asarray(whole(X[1:, n_padding:]))[0])


@pytest.mark.parametrize(("window", "max_len", "n_slots"), [(4, 31, 5), (4, 3, 3), (100, 31, 31)])
def test_the_state_holds_a_window_of_keys_in_the_activations_dtype(window, max_len, n_slots):
    module = bound(window, jnp.bfloat16)
    keys, values = jax.eval_shape(lambda: module.init_state(2, max_len)).memory["attend_0"]
    assert keys.shape == values.shape == (2, n_slots, 1, 4)
    assert keys.dtype == jnp.bfloat16


@pytest.mark.grid
@pytest.mark.parametrize("window", [7, 8, 16])
def test_beyond_max_len_a_prefill_sees_as_many_keys_as_steps(window):
    module = LocalAttention(D, 8, LocalAttentionConfig(2, window=window)).bind(init())
    state, _ = jax.jit(module.prefill)(module.init_state(2, 8), X[:, :8])
    _, together = jax.jit(module.prefill)(state, X[:, 8:16])
    step, steps = jax.jit(module.step), []
    for position in range(8, 16):
        state, y = step(state, X[:, position])
        steps.append(y)
    assert_close(together, np.stack(steps, axis=1))
