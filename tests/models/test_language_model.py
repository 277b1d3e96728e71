import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from grid import grid_but, in_grid, in_wide
from oracles import mixers_of, random_params, with_dropout
from tolerances import assert_close

from hyena_jax import models
from hyena_jax.config import (
    AFTLocalConfig,
    AFTSimpleConfig,
    AttentionConfig,
    HawkConfig,
    HyenaConfig,
    ImplicitFilterConfig,
    LanguageModelConfig,
    RWKV7Config,
)
from hyena_jax.models.blocks import REMAT_POLICIES
from hyena_jax.reference import delta_rule
from hyena_jax.reference import models as reference
from hyena_jax.system.errors import UserError

FILTER = ImplicitFilterConfig(emb_dim=3, width=4)
CONFIG = LanguageModelConfig(
    pattern=(HyenaConfig(filter=FILTER), AttentionConfig(2)), n_layers=2, d_model=8, d_ff=12, max_len=13,
    vocab_size=17, learned_positions=True,
)  # fmt: skip
TOKENS = np.random.default_rng(7).integers(0, 17, (2, 13), dtype=np.int32)
pytestmark = pytest.mark.xdist_group("language_model")  # its tests share compiled programs
ATTENTION = dataclasses.replace(CONFIG, pattern=CONFIG.pattern[1:])
VARIANTS = {
    "pre_norm": dataclasses.replace(CONFIG, n_layers=3),
    "griffin": dataclasses.replace(
        ATTENTION, norm="rms", final_norm="rms", ffn="geglu", learned_positions=False, scale_embedding=True,
        logit_scale=0.7, soft_cap=3.0, init="griffin",
    ),
    "bare_mixers": dataclasses.replace(
        ATTENTION, norm="none", ffn="none", d_ff=None, residual=False, init="torch"
    ),
    "mixers_and_residual_paths_alone": dataclasses.replace(
        ATTENTION, norm="none", final_norm="none", ffn="none", d_ff=None
    ),
    "untied_head_with_bias": dataclasses.replace(
        ATTENTION, ffn="gelu", final_norm="none", tied_head=False, head_bias=True, init="torch"
    ),
    "untied_head": dataclasses.replace(ATTENTION, ffn="relu", tied_head=False, init="xavier"),
    # Eps large enough to be seen.
    "striped_hyena_2": dataclasses.replace(
        ATTENTION, norm="rms_eps_outside", final_norm="rms_eps_outside", norm_eps=0.1, ffn="bilinear",
        first_ffn="geglu_erf", ffn_bias=False, tied_head=False, head_bias=True, vocab_multiple=4,
        learned_positions=False,
    ),
    "olmo_hybrid": dataclasses.replace(
        CONFIG, pattern=(AFTSimpleConfig(), AttentionConfig(2)), n_layers=3, norm="rms",
        norm_places=("before", "after"), norm_eps=0.1, ffn="swiglu", tied_head=False, learned_positions=False,
    ),
    "lfm2": dataclasses.replace(
        ATTENTION, norm="rms", final_norm="rms", norm_eps=0.1, ffn="swiglu", ffn_bias=False, vocab_multiple=8,
        scale_embedding=True, round_embedding_scale=True, learned_positions=False,
    ),
    "rwkv7": dataclasses.replace(
        ATTENTION, pattern=(RWKV7Config(2, decay_rank=2, rate_rank=3, value_rank=2, gate_rank=3, chunk=4),),
        ffn="squared_relu", ffn_shift=True, ffn_bias=False, embedding_norm="layer", tied_head=False,
        learned_positions=False, init="rwkv7",
    ),
}  # fmt: skip


@cache
def random_of(config):
    return random_params(config, TOKENS)


def init(config: LanguageModelConfig = CONFIG):
    """A tree of its own."""
    return jax.tree.map(lambda x: x, random_of(config))


@cache
def jitted(config: LanguageModelConfig, method: str | None = None):
    """A method of the model as a function of parameters and arguments; compiled once per shape."""
    model = models.build(config)
    return jax.jit(lambda params, *args: model.apply({"params": params}, *args, method=method))


def initial_state(config):
    model = models.build(config)
    state = jax.jit(lambda params: model.apply({"params": params}, 2, 13, method="init_state"))
    return state(init(config))


def logits_of(params, tokens, config: LanguageModelConfig = CONFIG):
    return jitted(config)(params, tokens)


@pytest.mark.parametrize("name", grid_but(VARIANTS, "pre_norm", "griffin", "striped_hyena_2", "olmo_hybrid"))
def test_equals_its_oracle(name):
    config, params = VARIANTS[name], init(VARIANTS[name])
    expected = reference.language_model(params, np.asarray(TOKENS), config, mixers_of(config))
    assert_close(logits_of(params, TOKENS, config), expected)


def test_features_before_the_first_layer_are_the_scaled_embedding():
    """Neither normed as those of the head are, nor scaled by the root itself where it is to be rounded."""
    config, params = VARIANTS["lfm2"], init(VARIANTS["lfm2"])
    run = partial(models.build(config).apply, layer=0, method="features")
    table, scale = params["embedding"]["embedding"], np.float32(jnp.bfloat16(8**0.5))
    np.testing.assert_array_equal(jax.jit(run)({"params": params}, TOKENS), scale * table[TOKENS])


@pytest.mark.grid
@pytest.mark.parametrize("name", VARIANTS)
def test_derivatives_in_both_modes(name):
    """With one mixer, since each mixer has its own test."""
    whole = VARIANTS[name]
    last = whole.norm_places[-1:]
    config = dataclasses.replace(whole, pattern=ATTENTION.pattern, n_layers=1, norm_places=last)
    with jax.enable_x64(True):
        model, tokens = models.build(config), TOKENS[:, :7]
        check_modes(lambda params: model.apply({"params": params}, tokens), init(config))


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("pre_norm", [3, 5]),
        pytest.param("pre_norm", None, marks=pytest.mark.wide),
        *[
            pytest.param(name, [3, 5], marks=pytest.mark.wide)
            for name in ("striped_hyena_2", "olmo_hybrid", "rwkv7")
        ],
        *[pytest.param(name, [3, 5], marks=pytest.mark.grid) for name in ("griffin", "bare_mixers", "lfm2")],
    ],
)
def test_decoding_equals_the_parallel_form(name, lengths):
    """A prefill, in which rows may start late, steps, and another prefill; of each row by itself."""
    config, lengths = VARIANTS[name], lengths if lengths is None else np.array(lengths)
    params = init(config)
    prefill, step = jitted(config, "prefill"), jitted(config, "step")
    state, first = prefill(params, initial_state(config), TOKENS[:, :5], lengths)
    parts = [first]
    for t in range(5, 8):
        state, y = step(params, state, TOKENS[:, t])
        parts.append(y[:, None])
    parts.append(prefill(params, state, TOKENS[:, 8:])[1])
    found = np.concatenate(parts, axis=1)
    starts = np.zeros(2, int) if lengths is None else 5 - lengths
    alone = np.zeros_like(TOKENS)  # what follows a row does not change it
    for row, start in enumerate(starts):
        alone[row, : 13 - start] = TOKENS[row, start:]
    expected = logits_of(params, alone, config)
    for row, start in enumerate(starts):
        assert_close(found[row, start:], expected[row, : 13 - start])


def test_a_padded_vocabulary_has_rows_without_effect():
    config = VARIANTS["lfm2"]
    params = init(config)
    assert params["embedding"]["embedding"].shape == (24, 8)
    assert init(VARIANTS["striped_hyena_2"])["head"]["kernel"].shape == (8, 20)
    logits = logits_of(params, TOKENS, config)
    assert logits.shape == (2, 13, 17)
    params["embedding"]["embedding"] = params["embedding"]["embedding"].at[17:].set(np.nan)
    np.testing.assert_array_equal(logits_of(params, TOKENS, config), logits)


@pytest.mark.parametrize(
    ("name", "embedding", "hidden", "out"),
    [
        ("gpt2", 0.02, 0.02, 0.02 / 4**0.5),
        pytest.param("griffin", 64**-0.5, 64**-0.5, (2 / (2 * 256)) ** 0.5, marks=pytest.mark.wide),
        pytest.param("torch", 1.0, (3 * 64) ** -0.5, (3 * 256) ** -0.5, marks=pytest.mark.grid),
        pytest.param("xavier", 0.02, (2 / 320) ** 0.5, (2 / 320) ** 0.5, marks=pytest.mark.grid),
    ],
)
def test_initial_deviations(name, embedding, hidden, out):
    """For 2 layers, D = 64, hidden width 256; a uniform variable on ±b has standard deviation b / sqrt(3)."""
    config = LanguageModelConfig(
        pattern=(AttentionConfig(),), n_layers=2, d_model=64, d_ff=256, vocab_size=50,
        learned_positions=True, tied_head=False, head_bias=True, init=name,
    )  # fmt: skip
    params = jax.jit(models.build(config).init)(jax.random.key(0), TOKENS[:1, :1])["params"]
    mlp = params["blocks_0"]["mlp"]
    expected = {
        "embedding": (params["embedding"]["embedding"], embedding),
        "positions": (params["positions"], embedding),
        "head": (params["head"]["kernel"], (2 / (64 + 50)) ** 0.5 if name == "xavier" else hidden),
        "in": (mlp["in_proj"]["kernel"], hidden),
        "out": (mlp["out_proj"]["kernel"], out),
        "in bias": (mlp["in_proj"]["bias"], hidden if name == "torch" else 0),
    }
    for what, (leaf, deviation) in expected.items():
        assert leaf.std() == pytest.approx(deviation, rel=0.15), what


def test_the_first_layer_s_values_reach_all_others_of_its_kind():
    config = VARIANTS["rwkv7"]
    mixed = dataclasses.replace(config, pattern=(AttentionConfig(2), *3 * config.pattern), n_layers=4)
    params = init(mixed)
    has_value = ["value" in params[f"blocks_{i}"]["mixer"] for i in range(4)]
    assert has_value == [False, False, True, True]
    attention, handed = mixers_of(mixed)[0], {}

    def oracle(params, x):
        one_document = np.zeros(TOKENS.shape, np.int32)
        return delta_rule.rwkv7(mixed.pattern[1], params, x, mixed.max_len, one_document, handed)

    expected = reference.language_model(params, TOKENS, mixed, [attention, *3 * [oracle]])
    assert_close(logits_of(params, TOKENS, mixed), expected)


@pytest.mark.grid
def test_initial_values_of_rwkv7():
    """The published code's: orthogonal kernels by the ratio of widths, residual outputs of 0, tiny
    embeddings; token shifts by the depth."""
    config = LanguageModelConfig(
        pattern=(RWKV7Config(2),), n_layers=4, d_model=16, ffn="squared_relu", ffn_shift=True,
        ffn_bias=False, d_ff=64, vocab_size=50, tied_head=False, init="rwkv7",
    )  # fmt: skip
    params = jax.jit(models.build(config).init)(jax.random.key(0), TOKENS)["params"]

    def assert_orthogonal(kernel, gain):
        rows, columns = kernel.shape
        product = kernel @ kernel.T if rows <= columns else kernel.T @ kernel
        assert_close(product, gain**2 * np.eye(min(rows, columns)))

    block = params["blocks_2"]
    mixer, t = block["mixer"], np.arange(16) / 16
    assert np.abs(params["embedding"]["embedding"]).max() == pytest.approx(1e-4, rel=0.05)
    assert_orthogonal(params["head"]["kernel"], 0.5 * (50 / 16) ** 0.5)
    assert_orthogonal(block["mlp"]["in_proj"]["kernel"], 2)
    assert_orthogonal(mixer["r_proj"]["kernel"], 1)
    assert_orthogonal(mixer["k_proj"]["kernel"], 0.1)
    assert_orthogonal(mixer["gate"]["up"]["kernel"], 0.1 * 2**0.5)  # rank 32, width 16
    for leaf in (mixer["out_proj"], block["mlp"]["out_proj"], mixer["decay"]["down"]):
        assert not np.any(leaf["kernel"])
    assert_close(block["mlp_shift"]["mu"], 1 - t ** (0.5**4))
    assert_close(mixer["value"]["bias"], 0.73 - 0.4 * (np.arange(16) / 15 - 0.5))
    assert {float(mixer["booster"][3]), float(mixer["bonus"][1, 2])} == {np.float32(1.02), np.float32(-0.04)}


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "n_layers", "policy"),
    [
        *(("pre_norm", 1, policy) for policy in REMAT_POLICIES),
        *(("rwkv7", 2, policy) for policy in ("block", "dots")),  # whose first layer hands values on
    ],
)
def test_remat_changes_nothing_but_memory(name, n_layers, policy):
    config = dataclasses.replace(VARIANTS[name], pattern=VARIANTS[name].pattern[:1], n_layers=n_layers)
    params = init(config)

    @partial(jax.jit, static_argnums=1)
    def gradients(params, config):
        model = models.build(config)
        return jax.grad(lambda params: (model.apply({"params": params}, TOKENS) ** 2).mean())(params)

    plain, again = (gradients(params, c) for c in (config, dataclasses.replace(config, remat=policy)))
    jax.tree.map(assert_close, plain, again)


def test_kept_filters_are_not_made_again_for_the_backward_pass():
    """One product fewer, of the filter network's last layer: derivatives of the layers before need these."""
    config = dataclasses.replace(CONFIG, pattern=CONFIG.pattern[:1], n_layers=1, ffn="none", d_ff=None)

    def products(policy):
        model = models.build(dataclasses.replace(config, remat=policy))
        loss = jax.grad(lambda params: model.apply({"params": params}, TOKENS).sum())
        return str(jax.make_jaxpr(loss)(init(config))).count("dot_general[")

    assert products("filters") == products("block") - 1


@pytest.mark.parametrize(
    "name", ["griffin", *in_wide("untied_head_with_bias"), *in_grid("pre_norm", "striped_hyena_2", "lfm2")]
)
def test_bfloat16_activations_keep_float32_parameters_and_logits(name):
    config = VARIANTS[name]
    half = dataclasses.replace(config, dtype="bfloat16")
    params = init(half)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits = logits_of(params, TOKENS, half)
    assert logits.dtype == jnp.float32
    assert_close(logits, logits_of(params, TOKENS, config), "bfloat16")


@pytest.mark.grid
@pytest.mark.parametrize("name", ["griffin", "untied_head_with_bias", "striped_hyena_2", "lfm2"])
def test_float64_stays_float64(name):
    config = dataclasses.replace(VARIANTS[name], pattern=CONFIG.pattern[:1], n_layers=1)
    params = jax.device_get(init(config))
    with jax.enable_x64(True):
        logits = logits_of(jax.tree.map(np.float64, params), TOKENS, config)
    assert logits.dtype == np.float64
    assert_close(logits_of(params, TOKENS, config), logits)


@pytest.mark.parametrize("remat", ["none", *in_wide("block")])
def test_dropout_needs_its_key_and_is_off_when_deterministic(remat):
    config = dataclasses.replace(ATTENTION, n_layers=1, dropout=0.5, remat=remat)
    model, params = models.build(config), init(config)
    sure, (once, again, other) = with_dropout(model, params, TOKENS, np.array([0, 0, 1]))
    assert_close(sure, logits_of(params, TOKENS, dataclasses.replace(config, dropout=0.0)))
    np.testing.assert_array_equal(once, again)
    assert not np.array_equal(once, other)


def test_bare_mixers_drop_nothing_but_the_embedding():
    """With a zero embedding dropout has no effect, so there is no other dropout."""
    config = dataclasses.replace(
        VARIANTS["bare_mixers"], n_layers=1, dropout=0.5, learned_positions=False,
        tied_head=False, head_bias=True,
    )  # fmt: skip
    model, params = models.build(config), init(config)
    params["embedding"]["embedding"] *= 0

    @jax.jit
    def run(params):
        rngs = {"dropout": jax.random.key(0)}
        dropped = model.apply({"params": params}, TOKENS, None, False, rngs=rngs)
        return dropped, model.apply({"params": params}, TOKENS)

    dropped, sure = run(params)
    assert_close(dropped, sure)
    assert np.std(dropped[..., 0]) > 0


def test_segments_reach_the_mixers_and_learned_positions_restart_with_each():
    config, params = ATTENTION, init(ATTENTION)
    segments = np.array([[0] * 6 + [1] * 7] * 2)
    repeated, other = TOKENS.copy(), TOKENS.copy()
    repeated[:, 6:12] = TOKENS[:, :6]
    other[:, :6] = 0
    logits = jitted(config)(params, repeated, segments)
    assert_close(logits[:, 6:12], logits[:, :6])
    whole = jitted(config)(params, TOKENS, segments)
    np.testing.assert_array_equal(whole[:, 6:], jitted(config)(params, other, segments)[:, 6:])
    with pytest.raises(ValueError, match="segment_ids"):
        jitted(CONFIG)(init(), TOKENS, segments)


def test_too_long_sequences_and_an_unknown_vocabulary_are_refused():
    with pytest.raises(UserError, match="vocab_size must be known when a model is built, got None"):
        models.build(LanguageModelConfig())
    with pytest.raises(ValueError, match="sequence length must be in 1..max_len=13, got 14"):
        logits_of(init(), jnp.zeros((1, 14), jnp.int32))


@pytest.mark.parametrize("learned", [True, *in_grid(False)])
def test_steps_beyond_max_len_are_no_numbers(learned):
    """Where a state does not grow, but learned positions or biases end."""
    mixer = AFTSimpleConfig() if learned else AFTLocalConfig(window=3)
    config = dataclasses.replace(CONFIG, pattern=(mixer,), n_layers=1, learned_positions=learned)
    params, step = init(config), jitted(config, "step")
    state, finite = initial_state(config), []
    for token in (*TOKENS.T, *TOKENS.T[:2]):
        state, logits = step(params, state, token)
        finite.append(bool(np.isfinite(logits).all()))
    assert finite == [True] * 13 + [False] * 2


@pytest.mark.parametrize(
    ("mixer", "learned_positions", "expected"),
    [(HawkConfig(), False, True), (HawkConfig(), True, False), (AttentionConfig(2), False, False)],
)
def test_which_models_decode_beyond_max_len(mixer, learned_positions, expected):
    config = dataclasses.replace(CONFIG, pattern=(mixer,), n_layers=1, learned_positions=learned_positions)
    assert models.is_unbounded(models.build(config)) == expected
