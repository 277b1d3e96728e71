import dataclasses
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from grid import grid_but, in_grid, in_wide
from oracles import mixers_of, random_params
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
    MixerConfig,
    RWKV7Config,
    register,
)
from hyena_jax.mixers import Mixer
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
VARIANTS = {
    "pre_norm": CONFIG,
    "griffin": dataclasses.replace(
        CONFIG, norm="rms", final_norm="rms", ffn="geglu", learned_positions=False, scale_embedding=True,
        logit_scale=0.7, soft_cap=3.0, init="griffin",
    ),
    "bare_mixers": dataclasses.replace(
        CONFIG, norm="none", ffn="none", d_ff=None, residual=False, init="torch"
    ),
    "mixers_and_residual_paths_alone": dataclasses.replace(
        CONFIG, norm="none", final_norm="none", ffn="none", d_ff=None
    ),
    "untied_head_with_bias": dataclasses.replace(
        CONFIG, ffn="gelu", final_norm="none", tied_head=False, head_bias=True, init="torch"
    ),
    "untied_head": dataclasses.replace(CONFIG, ffn="relu", tied_head=False, init="xavier"),
    # Eps large enough to be seen.
    "striped_hyena_2": dataclasses.replace(
        CONFIG, norm="rms_eps_outside", final_norm="rms_eps_outside", norm_eps=0.1, ffn="bilinear",
        first_ffn="geglu_erf", ffn_bias=False, tied_head=False, head_bias=True, vocab_multiple=4,
        learned_positions=False,
    ),
    "olmo_hybrid": dataclasses.replace(
        CONFIG, norm="rms", norm_places=("before", "after"), norm_eps=0.1, ffn="swiglu", tied_head=False,
        learned_positions=False,
    ),
    "lfm2": dataclasses.replace(
        CONFIG, norm="rms", final_norm="rms", norm_eps=0.1, ffn="swiglu", ffn_bias=False, vocab_multiple=8,
        scale_embedding=True, round_embedding_scale=True, learned_positions=False,
    ),
    "rwkv7": dataclasses.replace(
        CONFIG, pattern=(RWKV7Config(2, decay_rank=2, rate_rank=3, value_rank=2, gate_rank=3, chunk=4),),
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


def initial_state(config, params):
    model = models.build(config)
    return jax.jit(lambda params: model.apply({"params": params}, 2, 13, method="init_state"))(params)


def logits_of(params, tokens, config: LanguageModelConfig = CONFIG):
    return jitted(config)(params, tokens)


def test_the_pattern_repeats():
    model = models.build(dataclasses.replace(CONFIG, n_layers=3))
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    kinds = ["skip" in params[f"blocks_{i}"]["mixer"] for i in range(3)]
    assert kinds == [True, False, True]


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
    config = dataclasses.replace(whole, pattern=CONFIG.pattern[1:], n_layers=1, norm_places=last)
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
        *[pytest.param(name, None, marks=pytest.mark.grid) for name in list(VARIANTS)[1:]],
        pytest.param("bare_mixers", [3, 5], marks=pytest.mark.grid),
    ],
)
def test_decoding_equals_the_parallel_form(name, lengths):
    """A prefill, in which rows may start late, steps, and another prefill; of each row by itself."""
    config, lengths = VARIANTS[name], lengths if lengths is None else np.array(lengths)
    params = init(config)
    prefill, step = jitted(config, "prefill"), jitted(config, "step")
    state, first = prefill(params, initial_state(config, params), TOKENS[:, :5], lengths)
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
    params = jax.jit(models.build(config).init)(jax.random.key(0), TOKENS)["params"]
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


def behind_attention():
    """Attention and two layers of RWKV-7, and their parameters."""
    config = VARIANTS["rwkv7"]
    mixed = dataclasses.replace(config, pattern=(AttentionConfig(2), *2 * config.pattern), n_layers=3)
    return mixed, init(mixed)


def test_the_first_layer_s_values_reach_all_others_of_its_kind():
    mixed, params = behind_attention()
    assert ["value" in params[f"blocks_{i}"]["mixer"] for i in range(3)] == [False, False, True]
    attention, handed = mixers_of(mixed)[0], {}

    def oracle(params, x):
        one_document = np.zeros(TOKENS.shape, np.int32)
        return delta_rule.rwkv7(mixed.pattern[1], params, x, mixed.max_len, one_document, handed)

    expected = reference.language_model(params, TOKENS, mixed, [attention, oracle, oracle])
    assert_close(logits_of(params, TOKENS, mixed), expected)


@pytest.mark.grid
def test_the_first_layer_s_values_in_decoding_and_in_documents():
    mixed, params = behind_attention()
    state, first = jitted(mixed, "prefill")(params, initial_state(mixed, params), TOKENS[:, :12])
    last = jitted(mixed, "step")(params, state, TOKENS[:, 12])[1]
    whole = logits_of(params, TOKENS, mixed)
    assert_close(np.concatenate([first, last[:, None]], axis=1), whole)
    ids = np.repeat([[0, 1], [2, 3]], [5, 8], axis=1)
    packed = jitted(mixed)(params, TOKENS, ids)
    assert_close(packed[:, 5:], jitted(mixed)(params, TOKENS[:, 5:]))
    assert_close(packed[:, :5], whole[:, :5])


def test_a_mixer_of_one_s_own_may_hand_values_on(own_parts):
    @dataclasses.dataclass(frozen=True)
    class SumConfig(MixerConfig):
        pass

    class Sum(Mixer):
        config: SumConfig = SumConfig()

        @nn.compact
        def mix(self, x, seq, deterministic):
            return seq.of_first_layer("sum_x", x) + self.param("c", nn.initializers.ones, (self.d_model,))

    register("sum", SumConfig, Sum)
    config = dataclasses.replace(CONFIG, pattern=(SumConfig(),), n_layers=3, ffn="none", d_ff=None)
    config = dataclasses.replace(config, norm="none", final_norm="none", learned_positions=False)
    params = init(config)
    x = params["embedding"]["embedding"][TOKENS]
    total = 4 * x + sum(params[f"blocks_{i}"]["mixer"]["c"] for i in range(3))
    assert_close(logits_of(params, TOKENS, config), total @ params["embedding"]["embedding"].T)


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
    powers = np.array([0.2, 0.9, 0.7, 0.7, 0.9, 0.2])[:, None]
    assert_close(mixer["shift_mix"], 1 - t ** (0.5 * powers))
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

    def products(policy):
        config = dataclasses.replace(VARIANTS["pre_norm"], pattern=(HyenaConfig(),), n_layers=1, remat=policy)
        model = models.build(config)
        params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
        loss = jax.grad(lambda params: model.apply({"params": params}, TOKENS).sum())
        return str(jax.make_jaxpr(loss)(params)).count("dot_general[")

    assert products("none") < products("filters") == products("block") - 1


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
    config = dataclasses.replace(VARIANTS[name], pattern=(HyenaConfig(filter=FILTER),), n_layers=1)
    params = init(config)
    narrow = logits_of(params, TOKENS, config)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.float64(x)), params)
        logits = logits_of(wide, TOKENS, config)
    assert logits.dtype == np.float64
    assert_close(narrow, logits)


@pytest.mark.parametrize("remat", ["none", *in_wide("block")])
def test_dropout_needs_its_key_and_is_off_when_deterministic(remat):
    plain = dataclasses.replace(CONFIG, pattern=CONFIG.pattern[1:], n_layers=1)
    config = dataclasses.replace(plain, dropout=0.5, remat=remat)
    params = init(config)
    np.testing.assert_array_equal(logits_of(params, TOKENS, config), logits_of(params, TOKENS, plain))

    @jax.jit
    def dropped(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return models.build(config).apply({"params": params}, TOKENS, None, False, rngs=rngs)

    np.testing.assert_array_equal(dropped(0), dropped(0))
    assert not np.array_equal(dropped(0), dropped(1))


def test_bare_mixers_drop_nothing_but_the_embedding():
    """With a zero embedding dropout has no effect, so there is no other dropout."""
    config = dataclasses.replace(
        VARIANTS["bare_mixers"], dropout=0.5, learned_positions=False, tied_head=False, head_bias=True
    )
    params = init(config)
    params["embedding"]["embedding"] *= 0

    @jax.jit
    def dropped_out(params):
        rngs = {"dropout": jax.random.key(0)}
        return models.build(config).apply({"params": params}, TOKENS, None, False, rngs=rngs)

    dropped = dropped_out(params)
    assert_close(dropped, logits_of(params, TOKENS, config))
    assert np.std(dropped[..., 0]) > 0


def test_segments_reach_the_mixers_and_learned_positions_restart_with_each():
    config = dataclasses.replace(CONFIG, pattern=(AttentionConfig(2),))
    params = init(config)
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


def test_too_long_sequences_are_refused():
    with pytest.raises(ValueError, match="sequence length must be in 1..max_len=13, got 14"):
        logits_of(init(), jnp.zeros((1, 14), jnp.int32))


@pytest.mark.parametrize(
    "mixer",
    [AFTSimpleConfig(), *in_grid(AFTLocalConfig(window=3)), AttentionConfig(2)],
    ids=["positions", "biases", "cache"],
)
def test_steps_beyond_max_len_are_no_numbers(mixer):
    """Where a state does not grow, but positions or biases end; and where it is full."""
    learned = isinstance(mixer, AFTSimpleConfig)
    config = dataclasses.replace(CONFIG, pattern=(mixer,), learned_positions=learned)
    params, step = init(config), jitted(config, "step")
    state, finite = initial_state(config, params), []
    for token in (*TOKENS.T, *TOKENS.T[:2]):
        state, logits = step(params, state, token)
        finite.append(bool(np.isfinite(logits).all()))
    assert finite == [True] * 13 + [False] * 2


def test_an_unknown_vocabulary_is_refused():
    with pytest.raises(UserError, match="vocab_size must be known when a model is built, got None"):
        models.build(LanguageModelConfig())


@pytest.mark.parametrize(
    ("mixer", "learned_positions", "expected"),
    [(HawkConfig(), False, True), (HawkConfig(), True, False), (AttentionConfig(2), False, False)],
)
def test_which_models_decode_beyond_max_len(mixer, learned_positions, expected):
    config = dataclasses.replace(CONFIG, pattern=(mixer,), n_layers=1, learned_positions=learned_positions)
    assert models.is_unbounded(models.build(config)) == expected
