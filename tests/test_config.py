import dataclasses
import json
import os
import runpy
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from hyena_jax import config, models
from hyena_jax.cli.train import Train
from hyena_jax.config import (
    AttentionConfig,
    Experiment,
    HawkConfig,
    HyenaConfig,
    ImageClassifierConfig,
    ImagesConfig,
    LanguageModelConfig,
    LocalAttentionConfig,
    TaskConfig,
)
from hyena_jax.config.checks import field_types
from hyena_jax.config.flags import read_flags
from hyena_jax.system.errors import UserError
from hyena_jax.system.trees import named_leaves
from hyena_jax.training.optimizer import label_parameters

MIXED = Experiment(model=LanguageModelConfig(pattern=(HyenaConfig(order=3), AttentionConfig(2)), d_model=8))

COUNTS = {
    "annotated_hyena:hyena": 4_290_390,
    "annotated_hyena:attention": 10_721_664,
    "annotated_hyena:paper_block": 1_410_934,
    "gated_deltanet": 1_387_348_732,
    "gated_hyena": 190_976,
    "griffin:hawk_1b": 1_369_761_792,
    "griffin:griffin_1b": 1_308_477_440,
    "griffin:griffin_3b": 2_932_952_064,
    "griffin:recurrentgemma_2b": 2_682_862_080,
    **{f"images:{mixer}": 23_320 for mixer in ("fastmax", "fastmax_p1", "fastmax_p3", "softmax")},
    "images:hyena": 30_232,
    "images:gated": 32_872,
    **{f"images:mnist_{mixer}": 6_157 for mixer in ("fastmax", "fastmax_p1", "fastmax_p3", "softmax")},
    "images:mnist_hyena": 11_152,
    "images:mnist_gated": 14_197,
    "kimi_linear_hybrid": 3_432_229_920,
    "lfm2_350m": 354_483_968,
    "mamba2_130m": 128_989_632,
    "olmo_hybrid": 7_430_870_688,
    "pile_hyena:153m": 153_694_368,
    "pile_hyena:355m": 359_512_320,
    "pile_hyena:1p3b": 1_320_191_232,
    "quickstart": 701_760,
    "rwkv7_190m": 191_034_624,
    "shakespeare_1p5m:after": 1_523_456,
    "shakespeare_1p5m:published": 1_510_016,
    "shakespeare_cpu:hyena": 891_776,
    "shakespeare_cpu:annotated_hyena": 875_392,
    "shakespeare_cpu:gated_hyena": 853_376,
    "shakespeare_cpu:hawk": 868_224,
    "shakespeare_cpu:signed_hawk": 868_480,
    "shakespeare_cpu:griffin": 826_624,
    "shakespeare_cpu:gated_delta": 875_552,
    "shakespeare_cpu:kda": 874_512,
    "shakespeare_cpu:gated_delta2": 871_952,
    "shakespeare_cpu:rwkv7": 830_720,
    "shakespeare_cpu:mamba2": 875_440,
    "shakespeare_cpu:mamba3": 881_568,
    "shakespeare_cpu:attention": 809_856,
    "shakespeare_cpu:rotary_attention": 801_664,
    "shakespeare_cpu:local_attention": 800_512,
    "shakespeare_cpu:fastmax": 808_320,
    "shakespeare_cpu:aft_full": 818_048,
    "shakespeare_cpu:aft_local": 818_048,
    "shakespeare_cpu:aft_simple": 809_856,
    "shakespeare_cpu:aft_conv": 836_912,
    "shakespeare_cpu:h3": 868_480,
    "shakespeare_cpu:s4d": 834_688,
    "shakespeare_cpu:fir": 801_536,
    "shakespeare_cpu:stu": 818_048,
    "shakespeare_cpu:striped_hyena2": 810_936,
    "shakespeare_cpu:lfm2": 819_264,
    "striped_hyena2": 1_107_989_760,
    "tasks:recall": 70_532,
    "tasks:mqar": 43_904,
    "tasks:induction": 68_866,
    "tasks:selective_copying": 44_160,
    "tasks:copying": 37_696,
    "tasks:prefix_ngram": 37_696,
    "tasks:memorisation": 69_056,
    "tasks:mad_recall": 104_320,
    "tasks:mad_noisy_recall": 106_368,
    "tasks:mad_fuzzy_recall": 104_320,
    "tasks:mad_selective_copying": 104_320,
    "tasks:mad_compression": 110_800,
    "tasks:mad_memorisation": 132_928,
    "tasks:parity": 5_632,
    "tasks:modular_arithmetic": 43_392,
    "tasks:modular_addition": 42_752,
    "tasks:permutation_words": 42_880,
    "tasks:majority": 69_248,
    "tasks:counting": 44_160,
    "tasks:addition": 67_177,
    "wikitext103_hyena_125m:standard": 132_618_240,
    "wikitext103_hyena_125m:slim": 137_132_928,
}
EXTENSIONS = Path(__file__).parent / "extensions"
# Of configs with variants these are built by default, or under `wide`; all of them under `grid`.
BY_DEFAULT = {"tasks:recall", "images:hyena", "shakespeare_cpu:gated_delta"}
IN_WIDE = {
    *("annotated_hyena:hyena", "griffin:recurrentgemma_2b", "pile_hyena:153m"),
    *("shakespeare_cpu:hyena", "shakespeare_cpu:mamba2", "gated_hyena"),
}
IN_GRID = {spec for spec in COUNTS.keys() - BY_DEFAULT - IN_WIDE if ":" in spec}
IN_GRID |= {"striped_hyena2", "kimi_linear_hybrid"}
# Sizes that a config leaves to its data.
SYMBOLS = {"bytes": 256, "characters": 65, "graphemes": 65}
IMAGE_SIZES = {"digits": (8, 8), "mnist": (28, 28)}


def with_sizes_of_the_data(experiment: Experiment):
    model, data = experiment.model, experiment.data
    if isinstance(data, ImagesConfig):
        size = IMAGE_SIZES[data.name]
        return dataclasses.replace(model, image_size=size, channels=1, n_classes=10), jnp.zeros((1, *size, 1))
    if isinstance(data, TaskConfig):
        return dataclasses.replace(model, vocab_size=data.n_symbols), jnp.zeros((1, 8), jnp.int32)
    size = model.vocab_size or SYMBOLS[data.tokenizer]
    return dataclasses.replace(model, vocab_size=size), jnp.zeros((1, data.seq_len), jnp.int32)


def marks(spec: str) -> list[pytest.MarkDecorator]:
    is_wide = spec in IN_WIDE or COUNTS[spec] > 1e8
    return [pytest.mark.grid] if spec in IN_GRID else [pytest.mark.wide] if is_wide else []


@pytest.mark.parametrize("spec", [pytest.param(spec, marks=marks(spec)) for spec in COUNTS])
def test_shipped_configs_build_with_their_parameter_count_and_groups(spec):
    experiment = config.load(spec)
    params, found = counted(*with_sizes_of_the_data(experiment))
    assert found == COUNTS[spec]
    label_parameters(experiment.optimizer.groups, params)


def counted(model, inputs):
    """Shapes of the parameters, and their number; each round of the pattern after the first adds the same."""
    period = len(model.pattern)
    left_out = max(0, model.n_layers // period - 2)
    params = shapes(dataclasses.replace(model, n_layers=model.n_layers - left_out * period), inputs)
    of_a_round = {f"blocks_{i}": params[f"blocks_{i}"] for i in range(period, 2 * period)} if left_out else {}
    return params, size_of(params) + left_out * size_of(of_a_round)


def shapes(model, inputs):
    return jax.eval_shape(models.build(model).init, jax.random.key(0), inputs)["params"]


def size_of(params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def test_adamw_s_defaults_are_those_of_the_pages():
    default = config.AdamWConfig()
    assert (default.b1, default.b2, default.eps) == (0.9, 0.99, 1e-8)


@pytest.fixture(scope="module")
def shipped() -> dict[str, Experiment]:
    """What the shipped files return, by the name of the config or variant."""
    found = {}
    for name, path in config.config_files().items():
        file = runpy.run_path(str(path))
        variants = file.get("VARIANTS")
        make = file["get_config"]
        found |= {f"{name}:{variant}": make(variant) for variant in variants} if variants else {name: make()}
    return found


def test_every_shipped_config_and_variant_is_counted_and_survives_json(shipped):
    assert shipped.keys() == COUNTS.keys()
    for experiment in shipped.values():
        kept_in_json(experiment)


def test_shakespeare_cpu_lists_every_causal_mixer_at_a_similar_size(shipped):
    for name, config_class in config.MIXER_CONFIGS.items():
        pattern = shipped[f"shakespeare_cpu:{name}"].model.pattern
        assert [type(mixer) for mixer in pattern] == [config_class]
    counts = [count for spec, count in COUNTS.items() if spec.startswith("shakespeare_cpu:")]
    assert all(8e5 <= count <= 9e5 for count in counts)


def test_shakespeare_cpu_takes_a_mixer_that_it_does_not_list(own_parts):
    config.load_plugin(str(EXTENSIONS / "token_shift.py"))
    experiment = config.load("shakespeare_cpu:token_shift")
    assert experiment.model.pattern == (config.MIXER_CONFIGS["token_shift"](),)
    label_parameters(experiment.optimizer.groups, shapes(*with_sizes_of_the_data(experiment)))


def test_the_published_shakespeare_recipe_decays_kernels_and_taps_alone():
    experiment = config.load("shakespeare_1p5m:published")
    params = counted(*with_sizes_of_the_data(experiment))[0]
    groups = named_leaves(label_parameters(experiment.optimizer.groups, params))
    decayed = {name for name, group in groups.items() if group == 1}
    assert decayed == {name for name in groups if name.endswith(("/kernel", "/short_taps"))}


def test_an_optimizer_is_chosen_by_name_and_keeps_what_fits():
    def chosen(*arguments: str) -> config.OptimizerConfig:
        line = ["quickstart", "--workdir", "x", *arguments]
        return read_flags(Train, "train", line, {"experiment": experiment}).experiment.optimizer

    schedule = config.CosineConfig(warmup_steps=7, final_fraction=0.5)
    adamw = config.AdamWConfig(1e-3, schedule, weight_decay=0.3, groups=config.HYENA_GROUPS, b2=0.5)
    experiment = dataclasses.replace(MIXED, optimizer=adamw)
    assert chosen("--optimizer", "muon") == config.MuonConfig(
        1e-3, schedule, weight_decay=0.3, groups=config.HYENA_GROUPS
    )
    # Learning rates and decays with other defaults are taken from the chosen optimizer.
    assert chosen("--optimizer=lion") == config.LionConfig(schedule=schedule, groups=config.HYENA_GROUPS)
    kept = config.WarmupStableDecayConfig(warmup_steps=7, final_fraction=0.5)
    found = chosen("--optimizer.schedule", "warmup_stable_decay", "--optimizer", "sgd")
    assert found == config.SGDConfig(schedule=kept, groups=config.HYENA_GROUPS)
    # What does not fit the chosen one's defaults may fit the other flags.
    schedule = config.CosineConfig(final_learning_rate=6e-4)
    experiment = dataclasses.replace(MIXED, optimizer=config.AdamWConfig(6e-3, schedule))
    assert chosen("--optimizer", "lion", "--optimizer.learning-rate", "1e-3").schedule == schedule
    with pytest.raises(UserError, match="final.learning.rate must be"):
        chosen("--optimizer", "lion")


def kept_in_json(experiment: Experiment) -> dict:
    """The values in JSON, from which the same experiment is read."""
    values = json.loads(json.dumps(config.encode(experiment)))
    assert config.decode(values) == experiment
    return values


def test_every_optimizer_schedule_and_filter_survives_json():
    for name, optimizer in config.OPTIMIZER_CONFIGS.items():
        assert kept_in_json(Experiment(optimizer=optimizer()))["optimizer"]["type"] == name
    for name, schedule in config.SCHEDULE_CONFIGS.items():
        values = kept_in_json(Experiment(optimizer=config.LionConfig(schedule=schedule())))
        assert values["optimizer"]["schedule"]["type"] == name
    for name, long_filter in config.FILTER_CONFIGS.items():
        mixer = HyenaConfig(filter=long_filter())
        values = kept_in_json(Experiment(model=LanguageModelConfig(pattern=(mixer,))))
        assert values["model"]["pattern"][0]["filter"]["type"] == name


def with_pattern(*mixers: dict) -> dict:
    return {"model": {"type": "language_model", "pattern": list(mixers)}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (with_pattern({"type": "hyena", "ordr": 2}), "ordr"),
        ({"seed": "x"}, "seed must be an int, got 'x'"),
        ({"seed": True}, "seed must be an int, got True"),
        (with_pattern({"type": "hyena", "order": 2.7}), "order must be an int, got 2.7"),
        (with_pattern({"type": "hyena", "dropout": 10**400}), "dropout must be a finite float32"),
        (with_pattern({"type": "hyena", "outer_mixing": "x"}), "outer_mixing must be a bool, got 'x'"),
        ({"model": {"type": "language_model", "d_model": -1}}, "d_model must be at least 1, got -1"),
        ({"model": {}}, "model must be an object with a `type`, one of language_model, image_classifier"),
        (with_pattern({"type": "hyna"}), "mixer 'hyna' is unknown .did you mean 'hyena'"),
        ([], "an experiment must be a JSON object, got"),
    ],
)
def test_broken_json_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        config.decode(values)


def test_identity_and_runtime_differences():
    changed = dataclasses.replace(
        MIXED,
        seed=3,
        model=dataclasses.replace(MIXED.model, remat="block"),
        training=dataclasses.replace(MIXED.training, steps=7),
    )
    assert config.identity_differences(changed, MIXED) == ["seed: 0 -> 3"]
    assert config.runtime_differences(changed, MIXED) == [
        "model.remat: 'none' -> 'block'",
        "training.steps: 2000 -> 7",
    ]
    other = dataclasses.replace(MIXED, model=dataclasses.replace(MIXED.model, pattern=(AttentionConfig(2),)))
    assert config.identity_differences(other, MIXED) == [  # no line for each field of the mixers
        "model.pattern.0.type: 'hyena' -> 'attention'",
        "model.pattern.1.type: 'attention' -> None",
    ]
    assert config.identity_differences(MIXED, MIXED) == config.runtime_differences(MIXED, MIXED) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("quickstrat", "did you mean 'quickstart'"),
        ("shakespeare_cpu:hyna", "variant 'hyna' is unknown .did you mean 'hyena'"),
        ("missing.py", "config 'missing.py' is not a file"),
        ("quickstart:x", "config quickstart:x: it has no variants"),
        ("", "config '' is unknown"),
    ],
)
def test_unknown_configs_are_refused(spec, message):
    with pytest.raises(UserError, match=message):
        config.load(spec)


# A config with a value that its class refuses.
LIAR = """from hyena_jax.config import *
def get_config():
 e = Experiment(LanguageModelConfig())
 try: return e
 finally: """


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config(:", "SyntaxError"),
        ("x = 1", r"it has no get_config\(\)"),
        ("def get_config(): return 1", "must return an Experiment, got int"),
        ("class Own(BaseException): pass\ndef get_config(): raise Own(3)", r"Own: 3 \(.*broken.py:2\)"),
        (
            "class Own(Exception):\n def __str__(self): raise self\ndef get_config(): raise Own",
            "cannot be read: Own: ",
        ),
        (f"{LIAR}object.__setattr__(e, 'seed', '3')", "seed must be an int, got '3'"),
        (f"{LIAR}object.__setattr__(e, 'seed', b'3')", "TypeError: Object of type bytes is not JSON"),
        (f"{LIAR}object.__setattr__(e.model, 'pattern', (e.model,))", "RecursionError"),
        (f"{LIAR}object.__setattr__(e.model, 'pattern', (e.data,))", "TextConfig"),
        (
            f"{LIAR}object.__setattr__(e, '__class__', type('Own', (Experiment,), {{}}))",
            "must return an Experiment, got Own",
        ),
        (
            "from hyena_jax.config import *\ndef get_config(): return HyenaConfig(order=0)",
            "order must be at least 2 with gating 'gate_first', got 0",
        ),
    ],
)
def test_broken_config_files_are_refused(tmp_path, text, message):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        config.load(str(path))


WRONG_VALUES = [
    (lambda: config.ImplicitFilterConfig(emb_dim=4), "emb_dim must be odd and at least 3, got 4"),
    (lambda: HyenaConfig(order=0, gating="conv_first"), "order must be at least 1"),
    (lambda: LanguageModelConfig(pattern=()), "pattern must be at least one mixer"),
    (lambda: config.AdamWConfig(learning_rate=0.0), "learning_rate must be above 0"),
    (lambda: config.SGDConfig(momentum=0.0, nesterov=True), "nesterov must be False without momentum"),
    (lambda: config.AdafactorConfig(decay_rate=0.0), r"decay_rate must be in \(0, 1\], got 0.0"),
    (lambda: config.CosineConfig(warmup_steps=9, decay_steps=9), "decay_steps must be above warmup_steps=9"),
    (
        lambda: config.ConstantConfig(warmup_steps=0, initial_fraction=0.1),
        "initial_fraction must be 0 without warmup_steps",
    ),
    (lambda: config.TextConfig(tokenizer="bpe"), "tokenizer_path must be given exactly when"),
    (lambda: config.TextConfig(path=""), "path must be the path of a file or folder, or None, got ''"),
    (lambda: config.TextConfig(validation_path="x"), "validation_path must be given only together with path"),
    (
        lambda: config.AdamWConfig(
            learning_rate=1e-4, schedule=config.CosineConfig(final_learning_rate=2e-4)
        ),
        "final_learning_rate must be in 0..learning_rate=0.0001",
    ),
    (lambda: config.SGDConfig(learning_rate=float("nan")), "learning_rate must be a finite float32, got nan"),
    (lambda: Experiment(seed=-1), "seed must be in"),
    (
        lambda: Experiment(data=config.TextConfig(seq_len=257)),
        r"data.seq_len must be at most model.max_len=256 \(or raise model.max_len\), got 257",
    ),
]


def language_model(**options) -> LanguageModelConfig:
    return LanguageModelConfig(d_model=8, max_len=64, **options)


def without_ffn(**options) -> LanguageModelConfig:
    return language_model(ffn="none", d_ff=None, **options)


def with_mixer(mixer: config.MixerConfig) -> LanguageModelConfig:
    return language_model(pattern=(mixer,))


WRONG_MODELS = [
    (lambda: language_model(final_norm="rsm"), "final_norm 'rsm' is unknown .did you mean 'rms'"),
    (lambda: language_model(first_ffn="none"), "first_ffn must be one of gelu, .* or None, got 'none'"),
    (lambda: without_ffn(first_ffn="relu"), "first_ffn must be None with ffn 'none', got 'relu'"),
    (lambda: without_ffn(ffn_bias=False), "ffn_bias must be True with ffn 'none', got False"),
    (lambda: without_ffn(ffn_shift=True), "ffn_shift must be False with ffn 'none', got True"),
    (
        lambda: without_ffn(norm="none", final_norm="none", norm_eps=1e-5),
        "norm_eps must be None without norms",
    ),
    (lambda: language_model(norm_places=("before", "after")), "norm_places must be one place, got"),
    (
        lambda: language_model(pattern=(HyenaConfig(), HyenaConfig()), norm_places=("after",) * 3),
        "one place, or one for each of the pattern's 2",
    ),
    (lambda: language_model(norm_places=("behind",)), "norm_places must be a tuple of .*: one of before"),
    (
        lambda: language_model(norm="none", norm_places=("after",)),
        ".'before',. with norm 'none', got .'after',.",
    ),
    (lambda: AttentionConfig(qk_norm="all"), "qk_norm must be 'head' without qk_norm_eps, got 'all'"),
    (lambda: language_model(round_embedding_scale=True), "must be False without scale_embedding"),
    (lambda: language_model(d_ff=None), "d_ff must be a width with ffn 'gelu_tanh', got None"),
    (lambda: language_model(ffn="none"), "d_ff must be None with ffn 'none', got 512"),
    (lambda: language_model(residual=False), "residual must be True unless norm and ffn are 'none'"),
    (lambda: language_model(head_bias=True), "head_bias must be False with tied_head"),
    (
        lambda: with_mixer(HyenaConfig(bidirectional=True)),
        "pattern must be of causal mixers, .*, got 'hyena'",
    ),
    (lambda: with_mixer(config.FastmaxConfig(causal=False)), "of causal mixers.*got 'fastmax'"),
    (lambda: with_mixer(AttentionConfig(3)), "n_heads must be a divisor of d_model=8, got 3"),
    (lambda: with_mixer(HyenaConfig(n_heads=3)), "n_heads must be a divisor of .*d_model=8, got 3"),
    (lambda: with_mixer(HyenaConfig(n_blocks=3)), "n_blocks must be a divisor of max_len=64, got 3"),
    (lambda: with_mixer(HyenaConfig(n_heads=2, filter_groups=8)), "divisor of the channels of a head=4"),
    (lambda: with_mixer(HawkConfig(gate_blocks=3)), "gate_blocks must be a divisor of width=8, got 3"),
    (lambda: with_mixer(config.H3Config(head_dim=3)), "head_dim must be a divisor of d_model=8, got 3"),
    (
        lambda: with_mixer(LocalAttentionConfig(n_heads=4)),
        "pairs of the 2 channels of a head are rotated, got 0.5",
    ),
    (
        lambda: with_mixer(config.AttentionConfig(n_heads=2, rotary_fraction=0.1)),
        "pairs of the 4 channels of a head.*got 0.1",
    ),
    (
        lambda: with_mixer(config.FIRConfig(config.ExplicitFilterConfig(65))),
        "n_taps must be at most max_len=64, got 65",
    ),
    (
        lambda: with_mixer(HyenaConfig(filter=config.TransferFunctionFilterConfig(n_state=64))),
        "n_state must be below max_len=64, got 64",
    ),
    (
        lambda: ImageClassifierConfig(image_size=(9, 9), patch_size=(4, 10)),
        "patch_size must be at most image_size=.9, 9.",
    ),
    (lambda: ImageClassifierConfig().max_len, "image_size must be known when a model is built, got None"),
    (lambda: Experiment(model=ImageClassifierConfig()), "data must be what the model reads"),
    (lambda: Experiment(data=ImagesConfig()), "data must be what the model reads"),
]
WRONG_MIXERS_AND_FILTERS = [
    (lambda: HyenaConfig(short_filter_len=0, short_init="lecun_normal"), "short_init must be 'uniform'"),
    (lambda: HyenaConfig(short_filter_len=0, short_bias=False), "short_bias must be True with"),
    (lambda: config.GatedHyenaConfig(causal=False, short_filter_len=4), "odd when causal is False, got 4"),
    (lambda: HawkConfig(min_radius=0.0), "min_radius must be in .0, max_radius=0.999., got 0.0"),
    (lambda: config.GatedDeltaConfig(n_value_heads=6), "n_value_heads must be a multiple of n_heads=4"),
    (lambda: with_mixer(config.GatedDeltaConfig(3)), "n_heads must be a divisor of d_model=8, got 3"),
    (lambda: config.Mamba2Config(n_groups=3), "n_groups must be a divisor of n_heads=4, got 3"),
    (lambda: config.Mamba2Config(dt_limit=(0.1, 0.0)), "dt_limit must be two ordered numbers"),
    (lambda: with_mixer(config.Mamba2Config(3)), "n_heads must be a divisor of inner_factor . d_model=16"),
    (lambda: HawkConfig(sign="shifted"), "min_radius must be below 0.9 with sign 'shifted'.*got 0.9"),
    (lambda: AttentionConfig(4, n_kv_heads=3), "n_kv_heads must be a divisor of n_heads=4, got 3"),
    (lambda: AttentionConfig(rotary_scaling=2.0), "rotary_scaling must be 1 with rotary_fraction 0, got 2.0"),
    (lambda: AttentionConfig(hard_alibi_heads=4), "hard_alibi_heads must be below n_heads=4"),
    (lambda: AttentionConfig(hard_alibi_heads=1, n_kv_heads=2), "a multiple of the 2 heads"),
    (lambda: AttentionConfig(hard_alibi_heads=1, causal=False), "must be 0 with causal False"),
    (lambda: config.ShortFilterConfig(decay=(2.0, 1.0)), "decay must be two rates in .*, got .2.0, 1.0."),
    (lambda: config.RealModalFilterConfig(min_rate=1.0), "min_rate must be in .0, max_rate=0.0368."),
    (lambda: config.S4DFilterConfig(n_state=7), "n_state must be even and at least 2, got 7"),
    (lambda: config.S4DFilterConfig(dt_min=1.0), "dt_min must be in .0, dt_max=0.1., got 1.0"),
    (lambda: config.SirenFilterConfig(fast_decay=2), "fast_decay must be in .1e-6, slow_decay=1.5., got 2"),
]
WRONG_TYPES = [
    (lambda: HyenaConfig(filter=HyenaConfig()), "filter must be a FilterConfig, got"),
    (lambda: with_mixer("hyena"), "pattern must be a tuple of any number of: a MixerConfig"),
    (lambda: LanguageModelConfig(pattern=[HyenaConfig()]), "pattern must be a tuple"),
    (lambda: LanguageModelConfig(d_model=None), "d_model must be an int, got None"),
    (lambda: LanguageModelConfig(soft_cap=float("inf")), "soft_cap must be a finite float32 or None"),
    (lambda: ImageClassifierConfig(image_size=8), "image_size must be a tuple of 2 of: an int or None"),
    (lambda: models.build(HyenaConfig()), "config must be a ModelConfig"),
]


@pytest.mark.parametrize(
    ("make", "message"), [*WRONG_VALUES, *WRONG_MODELS, *WRONG_MIXERS_AND_FILTERS, *WRONG_TYPES]
)
def test_what_is_wrong_is_refused_by_name(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_no_option_that_counts_takes_a_number_below_zero(own_parts):
    parts = [kind for registry in config.REGISTRIES for kind in registry.values()]
    for kind in (*parts, Experiment, config.ParameterGroup, config.TrainingConfig, config.LoggingConfig):
        for name, hint in field_types(kind).items():
            if int in (hint, *typing.get_args(hint)):
                with pytest.raises(UserError, match=f"^{name} must be .*, got -1$"):
                    kind(**{name: -1})


def test_the_experiment_that_is_loaded_is_made_of_plain_values(tmp_path):
    """As in a run folder, since a user's class may give other values each time."""
    path = tmp_path / "own.py"
    path.write_text(
        "from hyena_jax.config import *\nclass Own(int):\n def __add__(self, other): 1 / 0\n"
        "def get_config(): return Experiment(seed=Own(3))"
    )
    loaded = config.load(str(path))
    assert loaded == Experiment(seed=3)
    assert type(loaded.seed) is int


@pytest.mark.parametrize("name", ["caf\udce9", "\ud800"])
def test_a_workdir_is_a_path_in_utf_8(tmp_path, name):
    with pytest.raises(UserError, match=r"workdir must be a path in UTF-8, got '/.*\\ud"):
        config.is_run(tmp_path / name / "run")


@pytest.mark.parametrize("targets", ["a{99999999999}", "(" * 3000 + ")" * 3000])
def test_targets_that_are_too_much_for_a_pattern(targets):
    with pytest.raises(UserError, match=r"targets must be a regular expression, got '[a(]"):
        config.LoRAConfig(rank=1, targets=targets)


def test_special_files_are_no_configs(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(UserError, match="is not a file"):
        config.load(str(tmp_path / "pipe.py"))
    for content in (b"{", b"[" * 10**5, b"\xff", b'{"a":' * 10**5):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(UserError, match="config.json is not an experiment's config"):
            config.read(tmp_path / "config.json")
