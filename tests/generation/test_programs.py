"""Decoding without a state, by only the model's parallel form, in the same loop."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import in_grid

from hyena_jax import models
from hyena_jax.config import AttentionConfig, LanguageModelConfig, MixerConfig, ModelConfig, register
from hyena_jax.generation import saved_state
from hyena_jax.generation.decoding import Request, continuations, generate, prefill, proceed
from hyena_jax.generation.programs import Recomputing, note_recomputation, repeat_rows
from hyena_jax.generation.sampling import SamplingRule
from hyena_jax.system.errors import UserError

GREEDY = SamplingRule(greedy=True)
RAGGED = [np.array(prompt) for prompt in ([3], [1, 4, 1, 5, 9, 2, 6], [5, 3, 5])]


@dataclass(frozen=True)
class MeanConfig(MixerConfig):
    """The running mean of the tokens."""


class Mean(nn.Module):
    d_model: int
    max_len: int
    config: MeanConfig
    n_layers: int = 1
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x, segment_ids=None, deterministic=True):
        count = jnp.arange(1, x.shape[1] + 1)[:, None]
        return nn.Dense(self.d_model)(jnp.cumsum(x, axis=1) / count)


@dataclass(frozen=True)
class CountsConfig(ModelConfig):
    max_len: int = 16
    vocab_size: int | None = None


class Counts(nn.Module):
    """A model with only `__call__`: logits from the current token and the counts of tokens so far."""

    config: CountsConfig

    @nn.compact
    def __call__(self, tokens, segment_ids=None, deterministic=True):
        one_hot = jax.nn.one_hot(tokens, self.config.vocab_size)
        inputs = jnp.concatenate([one_hot, jnp.cumsum(one_hot, axis=1) / 4], axis=-1)
        return nn.Dense(self.config.vocab_size, kernel_init=nn.initializers.normal(3.0))(inputs)


def language_model(*pattern):
    sizes = {"n_layers": len(pattern), "d_model": 8, "d_ff": 8, "max_len": 16, "vocab_size": 11}
    return with_params(models.build(LanguageModelConfig(pattern=pattern, tied_head=False, **sizes)))


def with_params(model):
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["params"]
    return model, jax.tree.map(lambda x: 3 * x, params)  # so that the next token depends on the context


@pytest.fixture
def counts(own_parts):
    register("counts", CountsConfig, Counts)
    return with_params(models.build(CountsConfig(vocab_size=11)))


@pytest.fixture
def mean(own_parts):
    register("mean", MeanConfig, Mean)
    return language_model(MeanConfig())


def drawn(model, params, prompts, **options):
    return continuations(generate(model, params, prompts, Request(**options)))


def assert_same(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)


def naive(model, params, prompt, count):
    """Greedy tokens by one call of the model per token."""
    apply = jax.jit(model.apply)
    read, new = list(prompt), []
    for _ in range(count):
        padded = jnp.array([read + [0] * (16 - len(read))])
        new.append(int(apply({"params": params}, padded)[0, len(read) - 1].argmax()))
        read.append(new[-1])
    return new


@pytest.mark.grid
@pytest.mark.parametrize("rule", [SamplingRule(top_k=5), GREEDY])
def test_recomputing_equals_the_state(rule):
    """Prompts of several lengths and samples, slides of the context, and rows that stop."""
    model, params = language_model(AttentionConfig(n_heads=2))
    options = {"n_tokens": 30, "rule": rule, "seed": 5, "n_samples": 2, "stop_tokens": (10,)}
    expected = drawn(model, params, RAGGED, **options)
    assert_same(drawn(Recomputing(model), params, RAGGED, **options), expected)
    assert len({len(row.tokens) for row in expected}) > 1


@pytest.mark.parametrize("name", ["counts", *in_grid("mean")])
def test_models_without_a_state_are_decoded_by_calls_alone(name, request):
    model, params = request.getfixturevalue(name)
    assert not models.decodes_by_state(model)
    assert not models.is_unbounded(model)
    ours = drawn(model, params, RAGGED, n_tokens=10, rule=GREEDY, on_full="error")
    for prompt, row in zip(RAGGED, ours, strict=True):
        np.testing.assert_array_equal(row.tokens, naive(model, params, prompt, 10))
    assert len({tuple(row.tokens) for row in ours}) > 1
    with pytest.raises(UserError, match="max_new_tokens must be at most 16"):
        generate(model, params, RAGGED[:1], Request(17, on_full="error"))


@pytest.mark.grid
def test_all_logits_of_a_prefill_and_the_last_alone():
    model, params = language_model(AttentionConfig(n_heads=2))
    tokens = jnp.array([[0, 3, 1, 4], [1, 5, 9, 2]])
    lengths = jnp.array([3, 4])
    found = []
    for decoder in (Recomputing(model), model):

        @jax.jit
        def logits(params, decoder=decoder):
            def apply(*arguments, method):
                return decoder.apply({"params": params}, *arguments, method=method)

            state = apply(2, 9, method="init_state")
            state, first = apply(state, tokens, lengths, method="prefill")
            state, second = apply(state, tokens[:, 1:], None, True, method="prefill")
            state, third = apply(state, jnp.array([7, 8]), method="step")
            return first[0, 1:], first[1], second, third

        found.append(logits(params))
    assert found[0][2].shape == (2, 1, 11)
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.grid
def test_the_context_is_a_state_that_can_be_saved(mean, tmp_path):
    model, params = mean
    prompted = prefill(model, params, RAGGED[1:])
    origin = saved_state.origin(model.config, params)
    saved_state.save_state(tmp_path / "state", prompted, origin)
    loaded = saved_state.load_state(tmp_path / "state", model, params, origin)
    assert loaded.room == 16 - 7
    request = Request(30, seed=2)
    assert_same(*(continuations(proceed(model, params, p, request)) for p in (loaded, prompted)))


@pytest.mark.wide
def test_what_has_no_state_is_named(mean, counts):
    notes = []
    for model, _ in (mean, counts, language_model(AttentionConfig(n_heads=2))):
        note_recomputation(model, notes.append)
    after = "has no decoding state: the context is recomputed for every token"
    assert notes == [f"Mean {after}", f"Counts {after}"]


def test_what_a_model_lacks(mean, counts):
    assert models.lacks(language_model(AttentionConfig(n_heads=2))[0]) == []
    state, sharding = models.lacks(mean[0])
    assert state == "decoding state (Mean): generate recomputes the context for every token"
    assert sharding == "sequence_axis (Mean): parallel.sequence must be 1"
    assert [what.split()[0] for what in models.lacks(counts[0])] == ["decoding", "hidden", "sequence_axis"]


def test_a_model_without_a_vocabulary_cannot_generate(counts):
    class Bare(ModelConfig):
        max_len = 16

    with pytest.raises(UserError, match="model must be one whose config has vocab_size, got 'Bare'"):
        generate(Counts(Bare()), counts[1], RAGGED, Request(1))


def test_each_row_of_a_state_stands_beside_its_repetitions():
    np.testing.assert_array_equal(repeat_rows({"memory": np.arange(3)}, 2)["memory"], [0, 0, 1, 1, 2, 2])
