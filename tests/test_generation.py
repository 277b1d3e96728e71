import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyena_jax import models
from hyena_jax.config import HyenaConfig, LanguageModelConfig, UserError
from hyena_jax.generation import SamplingRule, generate, make_next_token, sample

LOGITS = jnp.log(jnp.array([0.05, 0.4, 0.3, 0.2, 0.05]))
MODEL = models.build(
    LanguageModelConfig(pattern=(HyenaConfig(),), n_layers=1, d_model=8, d_ff=8, max_len=6, vocab_size=11)
)
PARAMS = MODEL.init(jax.random.key(0), jnp.zeros((1, 6), jnp.int32))["params"]


def frequencies(rule: SamplingRule, count: int = 20_000) -> np.ndarray:
    draws = sample(jnp.tile(LOGITS, (count, 1)), jax.random.key(0), rule)
    return np.bincount(draws, minlength=5) / count


@pytest.mark.parametrize(
    ("rule", "weights"),
    [
        (SamplingRule(), [0.05, 0.4, 0.3, 0.2, 0.05]),
        (SamplingRule(temperature=0.5), [0.0025, 0.16, 0.09, 0.04, 0.0025]),
        (SamplingRule(top_k=2), [0, 0.4, 0.3, 0, 0]),
        (SamplingRule(top_k=99), [0.05, 0.4, 0.3, 0.2, 0.05]),
        (SamplingRule(top_p=0.65), [0, 0.4, 0.3, 0, 0]),
        (SamplingRule(top_p=0.71), [0, 0.4, 0.3, 0.2, 0]),
        (SamplingRule(top_p=1e-9), [0, 1, 0, 0, 0]),
        (SamplingRule(temperature=1e-45), [0, 1, 0, 0, 0]),
        (SamplingRule(greedy=True), [0, 1, 0, 0, 0]),
        (SamplingRule(top_k=1), [0, 1, 0, 0, 0]),
    ],
)
def test_draws_follow_the_rule(rule, weights):
    expected = np.array(weights) / np.sum(weights)
    seen = frequencies(rule)
    assert np.all(seen[expected == 0] == 0)
    # Five standard deviations of a binomial frequency.
    assert np.all(np.abs(seen - expected) <= 5 * np.sqrt(expected * (1 - expected) / 20_000) + 1e-12)


def naive_greedy(prompt: list[int], count: int) -> list[int]:
    """Greedy decoding by definition: the model on exactly the last max_len tokens."""
    tokens = list(prompt)
    for _ in range(count):
        logits = MODEL.apply({"params": PARAMS}, jnp.array([tokens[-6:]]))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prompt", [[3], [3, 1, 4], [3, 1, 4, 1, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6]])
def test_greedy_equals_its_definition_and_slides_when_the_context_is_full(prompt):
    new = generate(MODEL, PARAMS, np.array(prompt), 9, SamplingRule(greedy=True), seed=0)
    assert [int(token[0]) for token in new] == naive_greedy(prompt, 9)


def test_samples_of_a_batch_differ_and_a_seed_repeats_them():
    def draw(seed):
        return np.stack(list(generate(MODEL, PARAMS, np.array([1]), 8, SamplingRule(), seed, n_samples=3)))

    first = draw(0)
    assert first.shape == (8, 3)
    np.testing.assert_array_equal(first, draw(0))
    assert not np.array_equal(first, draw(1))
    assert len({tuple(row) for row in first.T}) == 3


def test_padded_vocabulary_is_never_drawn():
    drawn = list(
        generate(MODEL, PARAMS, np.array([1]), 50, SamplingRule(temperature=10.0), 0, 4, n_symbols=3)
    )
    assert np.max(drawn) == 2


def test_one_trace_serves_all_lengths():
    next_token = make_next_token(MODEL, SamplingRule())
    state = (jnp.zeros((1, 6), jnp.int32), jnp.int32(1))
    for i in range(9):
        *state, _ = next_token(PARAMS, *state, jax.random.key(i))
    assert next_token._cache_size() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 1.5}, "top_p must be in .0, 1., got 1.5"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"greedy": True, "top_k": 3}, "greedy must be alone"),
    ],
)
def test_wrong_rules_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        SamplingRule(**options)


@pytest.mark.parametrize(
    ("prompt", "n_tokens", "n_samples", "message"),
    [
        ([], 3, 1, "prompt must hold"),
        ([1], -1, 1, "max_new_tokens must be"),
        ([1], 3, 0, "num_samples must be"),
    ],
)
def test_wrong_requests_are_refused_before_the_first_token(prompt, n_tokens, n_samples, message):
    with pytest.raises(UserError, match=message):
        generate(MODEL, PARAMS, np.array(prompt, np.int32), n_tokens, SamplingRule(), 0, n_samples)
