from functools import cache

import jax
import numpy as np
import pytest
from grid import grid_but, in_grid

from hyena_jax import models
from hyena_jax.config import (
    AFTConvConfig,
    AttentionConfig,
    FastmaxConfig,
    HawkConfig,
    HyenaConfig,
    LanguageModelConfig,
    LocalAttentionConfig,
    ModalFilterConfig,
)
from hyena_jax.generation.decoding import Request, continuations, generate, prefill, proceed
from hyena_jax.generation.prompts import right_aligned
from hyena_jax.generation.sampling import SamplingRule
from hyena_jax.ops.online_conv import TILE
from hyena_jax.system.errors import UserError

pytestmark = pytest.mark.xdist_group("decoding")  # its tests share compiled programs
GREEDY = SamplingRule(greedy=True)
PROMPT = [3, 1, 4, 1, 5]
RAGGED = [[3], [4, 1]]
THREE = [[3], [1, 4, 1, 5, 9, 2, 6], [5, 3, 5]]
MAX_LEN = 300
PATTERNS = {
    "hyena": (HyenaConfig(),),
    "mixed": (HyenaConfig(order=3, gating="conv_first"), AttentionConfig(n_heads=2)),
    "griffin": (HawkConfig(), LocalAttentionConfig(n_heads=2, window=5)),
    "constant": (
        HyenaConfig(filter=ModalFilterConfig(n_modes=2)),
        FastmaxConfig(n_heads=2),
        AFTConvConfig(n_heads=2, n_taps=3),
    ),
}


def module_of(name, max_len=MAX_LEN):
    pattern = PATTERNS[name]
    sizes = {"n_layers": len(pattern), "d_model": 8, "d_ff": 8, "max_len": max_len, "vocab_size": 11}
    return models.build(LanguageModelConfig(pattern=pattern, **sizes))


@cache
def params_of(name, max_len=MAX_LEN):
    init = jax.jit(module_of(name, max_len).init)
    params = jax.device_get(init(jax.random.key(0), np.zeros((1, 3), np.int32))["params"])

    def scale(path, x):
        """Scales parameters up, so that the next token depends on the context; filters stay smooth."""
        return x if "filter" in jax.tree_util.keystr(path) else 3 * x

    return jax.device_put(jax.tree_util.tree_map_with_path(scale, params))


def model(name, max_len=MAX_LEN):
    return module_of(name, max_len), params_of(name, max_len)


def drawn(name, prompts, max_len=MAX_LEN, **options):
    module, params = model(name, max_len)
    prompts = [np.array(prompt) for prompt in prompts]
    return continuations(generate(module, params, prompts, Request(**options)))


@cache
def forward(name, max_len):
    module = module_of(name, max_len)
    return jax.jit(lambda params, tokens: jax.nn.log_softmax(module.apply({"params": params}, tokens)))


def log_probs_of(name, tokens, max_len=MAX_LEN):
    """Of the next token after each of `tokens`, by the parallel form, [length, vocabulary].

    Zeros up to max_len, which change nothing before them, let all lengths share one program.
    """
    padded = np.zeros((1, max_len), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(forward(name, max_len)(params_of(name, max_len), padded)[0, : len(tokens)])


def check_greedy(name, prompt, continuation, max_len=MAX_LEN):
    """Each token is the parallel form's most probable one, with the same log-probability."""
    tokens = np.concatenate([prompt, continuation.tokens])
    log_probs = log_probs_of(name, tokens[:-1], max_len)[len(prompt) - 1 :]
    chosen = np.take_along_axis(log_probs, continuation.tokens[:, None], axis=1)[:, 0]
    assert np.all(log_probs.max(-1) - chosen <= 1e-4)
    np.testing.assert_allclose(continuation.log_probs, chosen, atol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("name", grid_but([*PATTERNS, "longer"], "hyena"))
def test_greedy_equals_the_parallel_form(name):
    """Over several tiles of different sizes, after a prompt, up to the whole context."""
    name, max_len = ("hyena", 1000) if name == "longer" else (name, MAX_LEN)
    (continuation,) = drawn(name, [PROMPT], max_len, n_tokens=max_len - 4, rule=GREEDY)
    assert len(continuation.tokens) == max_len - 4
    check_greedy(name, PROMPT, continuation, max_len)
    assert len(set(continuation.tokens)) > 1


def test_lazy_decoding_is_the_reference():
    module, params = model("hyena")
    prefilled = prefill(module, params, [np.array(prompt) for prompt in THREE], context=128)
    requests = (Request(3 * TILE + 1, GREEDY, lazy=lazy) for lazy in (False, True))
    tiled, lazy = (continuations(proceed(module, params, prefilled, request)) for request in requests)
    for ours, expected in zip(tiled, lazy, strict=True):
        np.testing.assert_array_equal(ours.tokens, expected.tokens)
        np.testing.assert_allclose(ours.log_probs, expected.log_probs, atol=1e-5)


@pytest.mark.parametrize("name", grid_but(PATTERNS, "hyena"))
def test_prompts_of_different_lengths_equal_separate_runs(name):
    together = drawn(name, THREE, n_tokens=2 * TILE + 1, rule=GREEDY)
    for prompt, continuation in zip(THREE, together, strict=True):
        check_greedy(name, prompt, continuation)


@pytest.mark.parametrize("name", ["hyena", *in_grid("griffin")])
def test_a_row_depends_on_its_prompt_and_its_seed_alone(name):
    """Sample i has seed + i, modulo 2**32."""
    options = {"n_tokens": 2 * TILE + 1, "n_samples": 2}
    one, two = drawn(name, [[3, 1], [4, 9]], seed=2**32 - 2, **options)[1::2]
    two_again, next_of_two, one_again, next_of_one = drawn(name, [[4, 9], [3, 1]], seed=2**32 - 1, **options)
    np.testing.assert_array_equal(one.tokens, one_again.tokens)
    np.testing.assert_array_equal(two.tokens, two_again.tokens)
    wrapped = drawn(name, [[4, 9], [3, 1]], seed=0, **options)[::2]
    np.testing.assert_array_equal(next_of_two.tokens, wrapped[0].tokens)
    np.testing.assert_array_equal(next_of_one.tokens, wrapped[1].tokens)
    assert not np.array_equal(one.tokens, next_of_one.tokens)


def test_what_is_drawn_follows_the_models_distribution_without_padded_vocabulary():
    """The second token of many samples, given the first; chi-square as in the test of the rules."""
    samples = drawn("hyena", [[3]], n_tokens=2, n_samples=4000, n_symbols=7)
    pairs = np.array([row.tokens for row in samples])
    first = np.bincount(pairs[:, 0]).argmax()
    seen = np.bincount(pairs[pairs[:, 0] == first, 1], minlength=7)
    probabilities = np.exp(log_probs_of("hyena", [3, first])[-1, :7])
    expected = seen.sum() * probabilities / probabilities.sum()
    likely = expected > 5
    assert likely.sum() >= 3
    assert len(seen) == 7
    assert np.sum((seen - expected)[likely] ** 2 / expected[likely]) <= 36  # 1 - 1e-5 for 7 degrees


def test_rows_end_after_their_stop_tokens():
    options = {"n_tokens": 2 * TILE + 1, "n_samples": 2}
    free = drawn("hyena", RAGGED, **options)
    begin = [int(token) for token in free[0].tokens[:10]]
    stops = min(set(range(11)) - {*begin}), begin[-1]  # the second ends the first row
    stopped = drawn("hyena", RAGGED, **options, stop_tokens=stops)
    for before, after in zip(free, stopped, strict=True):
        found = np.flatnonzero(np.isin(before.tokens, stops))
        end = found[0] + 1 if len(found) else 2 * TILE + 1
        np.testing.assert_array_equal(after.tokens, before.tokens[:end])
        np.testing.assert_array_equal(after.log_probs, before.log_probs[:end])


@pytest.mark.parametrize("prompt", [*in_grid([3]), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]])
def test_a_full_context_slides_by_half(prompt):
    """By definition: after 16 tokens were read, the last 8 are read again."""
    (ours,) = drawn("hyena", [prompt], max_len=16, n_tokens=40, rule=GREEDY)
    read, new = prompt[-16:], []
    for _ in range(40):
        if len(read) > 16:
            read = read[-8:]
        new.append(int(log_probs_of("hyena", read, 16)[-1].argmax()))
        read.append(new[-1])
    np.testing.assert_array_equal(ours.tokens, new)


@pytest.mark.wide
def test_a_full_context_is_refused_by_choice():
    options = {"max_len": 16, "rule": GREEDY, "on_full": "error"}
    assert len(drawn("hyena", [[3]], **options, n_tokens=16)[0].tokens) == 16
    with pytest.raises(UserError, match="max_new_tokens must be at most 9 .*max_len=16.*, got 10"):
        drawn("hyena", [[3] * 8], **options, n_tokens=10)
    with pytest.raises(UserError, match="prompt length must be at most max_len=16, got 17"):
        drawn("hyena", [[3] * 17], **options, n_tokens=1)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["griffin", "constant"])
def test_states_that_do_not_grow_go_on_beyond_max_len(name):
    """They continue as in a model with a larger max_len."""
    (ours,) = drawn(name, [[3, 1]], max_len=16, n_tokens=40, rule=GREEDY, on_full="error")
    check_greedy(name, [3, 1], ours)


@pytest.mark.wide
def test_reading_goes_on_from_a_state():
    module, params = model("mixed")
    parts = prefill(module, params, [np.array(PROMPT[:2])])
    parts = prefill(module, params, [np.array(PROMPT[2:])], parts)
    whole = prefill(module, params, [np.array(PROMPT)])
    # The first request does not consume what was read.
    ours, again, expected = (
        continuations(proceed(module, params, prefilled, Request(TILE + 1)))[0].tokens
        for prefilled in (parts, parts, whole)
    )
    np.testing.assert_array_equal(ours, expected)
    np.testing.assert_array_equal(ours, again)


def test_rows_are_aligned_at_the_right():
    tokens, lengths = right_aligned([np.array([1, 2]), np.array([3, 4, 5])])
    np.testing.assert_array_equal(tokens, [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(lengths, [2, 3])
    assert right_aligned([np.array([1]), np.array([2])])[1] is None


def test_pieces_are_those_of_the_loop_and_end_once_every_row_has_stopped():
    module, params = model("hyena")

    def pieces(n_tokens=3 * TILE + 5, **options):
        request = Request(n_tokens=n_tokens, rule=GREEDY, **options)
        return list(generate(module, params, [np.array(prompt) for prompt in THREE], request))

    found = pieces()
    assert [piece.tokens.shape for piece in found] == [(3, 1), *[(3, TILE)] * 3, (3, 4)]
    assert len(pieces(stop_tokens=tuple(map(int, found[0].tokens[:, 0])))) == 1
    assert continuations(pieces(0)) == []


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts must be at least one"),
        ([[1], []], {}, "prompt must hold at least one token"),
        ([[11]], {}, r"prompt token must be in 0..10, got \[11\]"),
        ([[-1]], {}, "prompt token must be in 0..10"),
        ([[0.5]], {}, "prompt must be integers"),
        ([[1]], {"n_tokens": -1}, "max_new_tokens must be in 0..2147483647, got -1"),
        ([[1]], {"n_samples": 0}, "num_samples must be"),
        ([[1]], {"seed": -1}, "seed must be"),
        ([[1]], {"stop_tokens": (11,)}, "stop token must be in 0..10, got 11"),
        ([[1]], {"n_symbols": 12}, "n_symbols must be in 1..vocab_size=11"),
        ([[1]], {"on_full": "slip"}, "on_full 'slip' is unknown .did you mean 'slide'"),
    ],
)
def test_wrong_requests_are_refused_before_the_first_token(prompts, options, message):
    module, params = model("hyena")
    request = Request(**{"n_tokens": 3, **options})
    with pytest.raises(UserError, match=message):
        generate(module, params, [np.array(prompt) for prompt in prompts], request)
