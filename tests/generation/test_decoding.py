from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    UserError,
)
from hyena_jax.generation.decoding import (
    Request,
    continuations,
    generate,
    prefill,
    proceed,
)
from hyena_jax.generation.programs import repeat_rows
from hyena_jax.generation.prompts import right_aligned
from hyena_jax.generation.sampling import SamplingRule
from hyena_jax.ops.online_conv import TILE

GREEDY = SamplingRule(greedy=True)
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


def with_grid(*names):
    """All patterns; the named ones get the marker `grid`."""
    return [pytest.param(name, marks=pytest.mark.grid if name in names else ()) for name in PATTERNS]


@cache
def model(name, max_len=300):
    config = LanguageModelConfig(
        pattern=PATTERNS[name],
        n_layers=len(PATTERNS[name]),
        d_model=8,
        d_ff=8,
        max_len=max_len,
        vocab_size=11,
    )
    module = models.build(config)
    params = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["params"]

    def scale(path, x):
        """Scales parameters up, so that the next token depends on the context; filters stay smooth."""
        return x if "filter" in jax.tree_util.keystr(path) else 3 * x

    return module, jax.tree_util.tree_map_with_path(scale, params)


def drawn(name, prompts, max_len=300, **options):
    module, params = model(name, max_len)
    prompts = [np.array(prompt) for prompt in prompts]
    return continuations(generate(module, params, prompts, Request(**options)))


@cache
def forward(name, max_len):
    module, params = model(name, max_len)
    return jax.jit(lambda tokens: jax.nn.log_softmax(module.apply({"params": params}, tokens)))


def check_greedy(name, prompt, continuation, max_len=300):
    """Each token is the parallel form's most probable one, with the same log-probability."""
    tokens = np.concatenate([prompt, continuation.tokens]).astype(np.int32)
    log_probs = np.asarray(forward(name, max_len)(tokens[None, :-1])[0, len(prompt) - 1 :])
    chosen = np.take_along_axis(log_probs, continuation.tokens[:, None], axis=1)[:, 0]
    assert np.all(log_probs.max(-1) - chosen <= 1e-4)
    np.testing.assert_allclose(continuation.log_probs, chosen, atol=1e-4)


@pytest.mark.parametrize("name", with_grid("mixed", "griffin", "constant"))
def test_greedy_equals_the_parallel_form(name):
    """Over several tiles of different sizes, after a prompt, up to the whole context."""
    prompt = [3, 1, 4, 1, 5]
    (continuation,) = drawn(name, [prompt], n_tokens=296, rule=GREEDY)
    assert len(continuation.tokens) == 296
    check_greedy(name, prompt, continuation)
    assert len(set(continuation.tokens)) > 1


def test_greedy_equals_the_parallel_form_over_a_thousand_tokens():
    (continuation,) = drawn("hyena", [[3, 1]], max_len=1002, n_tokens=1000, rule=GREEDY)
    assert len(continuation.tokens) == 1000
    check_greedy("hyena", [3, 1], continuation, max_len=1002)


def test_lazy_decoding_is_the_reference():
    options = {"n_tokens": 200, "seed": 3, "n_samples": 2}
    tiled, lazy = (drawn("mixed", [[3, 1, 4]], **options, lazy=lazy) for lazy in (False, True))
    for ours, reference in zip(tiled, lazy, strict=True):
        np.testing.assert_array_equal(ours.tokens, reference.tokens)
        np.testing.assert_allclose(ours.log_probs, reference.log_probs, atol=1e-5)


@pytest.mark.parametrize("name", with_grid("mixed", "constant"))
def test_prompts_of_different_lengths_equal_separate_runs(name):
    prompts = [[3], [1, 4, 1, 5, 9, 2, 6], [5, 3, 5]]
    together = drawn(name, prompts, n_tokens=80, rule=GREEDY)
    for prompt, continuation in zip(prompts, together, strict=True):
        check_greedy(name, prompt, continuation)


@pytest.mark.parametrize("name", ["hyena", pytest.param("griffin", marks=pytest.mark.grid)])
def test_a_row_of_a_batch_equals_a_batch_of_one(name):
    prompts, options = [[3, 1], [4, 1], [5, 9]], {"n_tokens": 30, "seed": 5}
    together = drawn(name, prompts, **options)
    for prompt, row in zip(prompts, together, strict=True):
        np.testing.assert_array_equal(drawn(name, [prompt], **options)[0].tokens, row.tokens)


def test_sample_i_draws_with_seed_plus_i():
    samples = drawn("hyena", [[1], [2]], n_tokens=20, seed=7, n_samples=3)
    for i, row in enumerate(samples):
        alone = drawn("hyena", [[1 + i // 3]], n_tokens=20, seed=7 + i % 3)[0]
        np.testing.assert_array_equal(row.tokens, alone.tokens)
    assert len({tuple(row.tokens) for row in samples[:3]}) == 3


def test_a_seed_repeats_its_draws_at_its_largest():
    first, again = (drawn("hyena", [[1]], n_tokens=9, seed=2**32 - 1, n_samples=2) for _ in range(2))
    np.testing.assert_array_equal(first[1].tokens, again[1].tokens)
    np.testing.assert_array_equal(first[1].tokens, drawn("hyena", [[1]], n_tokens=9, seed=0)[0].tokens)


def test_top_1_equals_greedy():
    rules = GREEDY, SamplingRule(top_k=1)
    greedy, top = (drawn("hyena", [[3, 1]], n_tokens=70, rule=rule)[0].tokens for rule in rules)
    np.testing.assert_array_equal(greedy, top)


def test_what_is_drawn_follows_the_models_distribution():
    """The second token of many samples, given the first; chi-square as in the test of the rules."""
    count = 4000
    samples = drawn("hyena", [[3]], n_tokens=2, n_samples=count)
    pairs = np.array([row.tokens for row in samples])
    first = np.bincount(pairs[:, 0]).argmax()
    seconds = pairs[pairs[:, 0] == first, 1]
    log_probs = np.asarray(forward("hyena", 300)(jnp.array([[3, first]]))[0, -1])
    expected = len(seconds) * np.exp(log_probs)
    likely = expected > 5
    seen = np.bincount(seconds, minlength=11)
    assert np.sum((seen - expected)[likely] ** 2 / expected[likely]) <= 45  # 1 - 1e-5 for 11 degrees


def test_rows_end_after_their_stop_tokens():
    free = drawn("hyena", [[3], [4]], n_tokens=90, seed=1)
    stops = (int(free[0].tokens[9]),)
    stopped = drawn("hyena", [[3], [4]], n_tokens=90, seed=1, stop_tokens=stops)
    for before, after in zip(free, stopped, strict=True):
        found = np.flatnonzero(before.tokens == stops[0])
        end = found[0] + 1 if len(found) else 90
        np.testing.assert_array_equal(after.tokens, before.tokens[:end])
        np.testing.assert_array_equal(after.log_probs, before.log_probs[:end])


def test_pieces_end_once_every_row_has_stopped():
    module, params = model("hyena")
    first = int(drawn("hyena", [[3]], n_tokens=1, rule=GREEDY)[0].tokens[0])
    request = Request(200, GREEDY, stop_tokens=(first,))
    assert len(list(generate(module, params, [np.array([3])], request))) == 1


@pytest.mark.parametrize("prompt", [pytest.param([3], marks=pytest.mark.grid), [3, 1, 4, 5] * 6])
def test_a_full_context_slides_by_half(prompt):
    """By definition: after 16 tokens were read, the last 8 are read again."""
    (ours,) = drawn("hyena", [prompt], max_len=16, n_tokens=40, rule=GREEDY)
    read, new = list(prompt[-16:]), []
    for _ in range(40):
        if len(read) > 16:
            read = read[-8:]
        new.append(int(forward("hyena", 16)(jnp.array([read]))[0, -1].argmax()))
        read.append(new[-1])
    np.testing.assert_array_equal(ours.tokens, new)


def test_a_full_context_is_refused_by_choice():
    assert len(drawn("hyena", [[3]], max_len=16, n_tokens=16, on_full="error")[0].tokens) == 16
    with pytest.raises(UserError, match="max_new_tokens must be at most 16 .*max_len=16.*, got 17"):
        drawn("hyena", [[3]], max_len=16, n_tokens=17, on_full="error")
    with pytest.raises(UserError, match="prompt length must be at most max_len=16, got 17"):
        drawn("hyena", [[3] * 17], max_len=16, n_tokens=1, on_full="error")


@pytest.mark.parametrize("name", ["griffin", pytest.param("constant", marks=pytest.mark.grid)])
def test_states_that_do_not_grow_go_on_beyond_max_len(name):
    """They continue as in a model with a larger max_len."""
    (ours,) = drawn(name, [[3, 1]], max_len=16, n_tokens=40, rule=GREEDY, on_full="error")
    larger = drawn(name, [[3, 1]], n_tokens=40, rule=GREEDY)[0]
    np.testing.assert_array_equal(ours.tokens, larger.tokens)


def test_padded_vocabulary_is_never_drawn():
    rows = drawn("hyena", [[1]], n_tokens=50, rule=SamplingRule(temperature=10.0), n_samples=4, n_symbols=3)
    assert max(row.tokens.max() for row in rows) == 2


def test_reading_goes_on_from_a_state():
    module, params = model("mixed")
    whole, parts = np.array([3, 1, 4, 1, 5, 9]), None
    parts = prefill(module, params, [whole[:2]])
    parts = prefill(module, params, [whole[2:]], parts)
    request = Request(20, GREEDY)
    ours = continuations(proceed(module, params, parts, request))
    np.testing.assert_array_equal(ours[0].tokens, drawn("mixed", [whole], n_tokens=20, rule=GREEDY)[0].tokens)
    # The first request does not consume what was read.
    again = continuations(proceed(module, params, parts, request))
    np.testing.assert_array_equal(ours[0].tokens, again[0].tokens)


def test_rows_are_aligned_at_the_right():
    tokens, lengths = right_aligned([np.array([1, 2]), np.array([3, 4, 5])])
    np.testing.assert_array_equal(tokens, [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(lengths, [2, 3])
    assert right_aligned([np.array([1]), np.array([2])])[1] is None


@pytest.mark.parametrize("name", PATTERNS)
def test_repeated_rows_share_what_the_batch_shares(name):
    module, params = model(name)
    state = prefill(module, params, [np.array([3, 1]), np.array([4, 1])]).state
    six = module.apply({"params": params}, 6, 300, method="init_state")
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), s) for s in (repeat_rows(state, 3), six)]
    assert shapes[0] == shapes[1]


def test_pieces_are_those_of_the_loop():
    module, params = model("hyena")
    pieces = list(generate(module, params, [np.array([1])], Request(2 * TILE + 5, GREEDY)))
    assert [piece.tokens.shape for piece in pieces] == [(1, 1), (1, TILE), (1, TILE), (1, 4)]
    assert continuations(generate(module, params, [np.array([1])], Request(0))) == []


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts must be at least one"),
        ([[]], {}, "prompt must hold at least one token"),
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
