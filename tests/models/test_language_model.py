import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

from hyena_jax import models
from hyena_jax.config import AttentionConfig, HyenaConfig, LanguageModelConfig, UserError

CONFIG = LanguageModelConfig(
    pattern=(HyenaConfig(), AttentionConfig(2)),
    n_layers=3,
    d_model=8,
    d_ff=12,
    max_len=13,
    vocab_size=17,
    learned_positions=True,
)
TOKENS = jax.random.randint(jax.random.key(7), (2, 13), 0, 17)


def init(config: LanguageModelConfig = CONFIG):
    params = models.build(config).init(jax.random.key(0), TOKENS[:1])["params"]
    return jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), params)


def logits_of(params, tokens, config: LanguageModelConfig = CONFIG, **options):
    return models.build(config).apply({"params": params}, tokens, **options)


def test_the_pattern_repeats():
    params = init()
    kinds = ["skip" in params[f"blocks_{i}"]["mixer"] for i in range(3)]
    assert kinds == [True, False, True]


def test_equals_its_formula():
    """One attention layer at one position, where the mixer is a dense map of v."""
    config = dataclasses.replace(CONFIG, pattern=(AttentionConfig(1),), n_layers=1)
    params = jax.device_get(init(config))

    def norm(x, p):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * p["scale"] + p["bias"]

    def dense(x, p):
        return x @ p["kernel"] + p["bias"]

    block = params["blocks_0"]
    x = np.float64(params["embedding"]["embedding"][5] + params["positions"][0])
    v = dense(norm(x, block["mixer_norm"]), block["mixer"]["qkv_proj"])[16:]
    x = x + dense(v, block["mixer"]["out_proj"])
    hidden = dense(norm(x, block["mlp_norm"]), block["mlp"]["in_proj"])
    gelu = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
    x = x + dense(gelu, block["mlp"]["out_proj"])
    expected = params["embedding"]["embedding"] @ norm(x, params["final_norm"])
    assert_close(logits_of(params, jnp.array([[5]]), config)[0, 0], expected)


def test_decoding_equals_the_parallel_form():
    params = init()
    model = models.build(CONFIG).bind({"params": params})
    state, first = model.prefill(model.init_state(2, 13), TOKENS[:, :5])
    parts = [first]
    for t in range(5, 9):
        state, y = model.step(state, TOKENS[:, t])
        parts.append(y[:, None])
    state, last = model.prefill(state, TOKENS[:, 9:])
    assert_close(jnp.concatenate([*parts, last], axis=1), logits_of(params, TOKENS))


def test_rows_of_different_lengths_equal_separate_runs():
    params = init()
    model = models.build(CONFIG).bind({"params": params})
    state, y = model.prefill(model.init_state(2, 13), TOKENS[:, :7], jnp.array([3, 6]))
    state, y_step = model.step(state, TOKENS[:, 7])
    for row, length in enumerate([3, 6]):
        alone = logits_of(params, TOKENS[row : row + 1, 7 - length : 8])[0]
        assert_close(jnp.concatenate([y[row, 7 - length :], y_step[row][None]]), alone)


def test_remat_changes_nothing_but_memory():
    params = init()
    remat = dataclasses.replace(CONFIG, remat=True)

    def loss(params, config):
        return (logits_of(params, TOKENS, config) ** 2).mean()

    plain = jax.grad(loss)(params, CONFIG)
    again = jax.grad(loss)(params, remat)
    assert jax.tree.structure(plain) == jax.tree.structure(again)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        assert_close(a, b)


def test_bfloat16_activations_keep_float32_parameters_and_logits():
    half = dataclasses.replace(CONFIG, dtype="bfloat16")
    params = models.build(half).init(jax.random.key(0), TOKENS[:1])["params"]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits = logits_of(params, TOKENS, half)
    assert logits.dtype == jnp.float32
    assert_close(logits, logits_of(params, TOKENS), "bfloat16")


@pytest.mark.parametrize("remat", [False, True])
def test_dropout_needs_its_key_and_is_off_when_deterministic(remat):
    config = dataclasses.replace(CONFIG, dropout=0.5, remat=remat)
    params = init()
    np.testing.assert_array_equal(logits_of(params, TOKENS, config), logits_of(params, TOKENS))

    def dropped(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return models.build(config).apply({"params": params}, TOKENS, None, False, rngs=rngs)

    np.testing.assert_array_equal(dropped(0), dropped(0))
    assert not np.array_equal(dropped(0), dropped(1))


def test_segments_reach_the_mixers():
    config = dataclasses.replace(CONFIG, pattern=(AttentionConfig(2),))
    params = init(config)
    segments = jnp.array([[0] * 6 + [1] * 7] * 2)
    whole = logits_of(params, TOKENS, config, segment_ids=segments)
    other = TOKENS.at[:, :6].set(0)
    np.testing.assert_array_equal(whole[:, 6:], logits_of(params, other, config, segment_ids=segments)[:, 6:])
    with pytest.raises(ValueError, match="segment_ids must be None: a long filter"):
        logits_of(init(), TOKENS, segment_ids=segments)


def test_too_long_sequences_are_refused():
    with pytest.raises(ValueError, match="sequence length must be at most max_len=13, got 14"):
        logits_of(init(), jnp.zeros((1, 14), jnp.int32))


def test_an_unknown_vocabulary_is_refused():
    with pytest.raises(UserError, match="vocab_size must be known when a model is built, got None"):
        models.build(LanguageModelConfig())
