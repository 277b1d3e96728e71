import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from hyena_jax import config, models
from hyena_jax.config import AttentionConfig, Experiment, HyenaConfig, LanguageModelConfig, UserError
from hyena_jax.training.optimizer import label_parameters

MIXED = Experiment(model=LanguageModelConfig(pattern=(HyenaConfig(order=3), AttentionConfig(2)), d_model=8))

COUNTS = {
    "quickstart": 701_760,
    "shakespeare_cpu:hyena": 891_776,
    "shakespeare_cpu:attention": 809_856,
    "shakespeare_1p5m": 1_523_456,
    "wikitext103_hyena_125m": 132_618_240,
    "pile_hyena_153m": 153_694_368,
}


@pytest.mark.parametrize(("spec", "count"), COUNTS.items())
def test_shipped_configs_build_with_their_parameter_count_and_groups(spec, count):
    experiment = config.load(spec)
    symbols = experiment.model.vocab_size or {"bytes": 256, "characters": 65}[experiment.data.tokenizer]
    model = models.build(dataclasses.replace(experiment.model, vocab_size=symbols))
    tokens = jnp.zeros((1, experiment.data.seq_len), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count
    label_parameters(experiment.optimizer.groups, params)


def test_every_shipped_config_is_counted():
    assert set(config.config_files()) == {spec.partition(":")[0] for spec in COUNTS}


def test_pile_count_by_hand():
    d, f, width = 864, 1728, 64
    filter_size = 2048 * 33 + 33 * width + 2 * width**2 + width * d + 4 * width
    layer = d * 3 * d + 3 * d + d * d + d + 3 * d * 4 + d + filter_size + 2 * d * f + f + d + 4 * d
    assert 18 * layer + 50257 * d + 2 * d == COUNTS["pile_hyena_153m"]


def test_json_round_trip():
    values = json.loads(json.dumps(config.encode(MIXED)))
    assert values["model"]["pattern"][1] == {"type": "attention", "n_heads": 2}
    assert config.decode(values) == MIXED


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"pattern": [{"type": "hyena", "ordr": 2}]}}, "ordr"),
        ({"seed": "x"}, "expected int"),
        ({"model": {"d_model": -1}}, "d_model must be at least 1, got -1"),
        ({"model": {"pattern": [{"type": "hyna"}]}}, "pattern"),
        ([], "an experiment must be a JSON object, got"),
    ],
)
def test_broken_json_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        config.decode(values)


def test_unreadable_config_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not an experiment's config"):
        config.read(tmp_path / "config.json")


def test_identity_and_runtime_differences():
    changed = dataclasses.replace(
        MIXED,
        seed=3,
        model=dataclasses.replace(MIXED.model, remat=True),
        training=dataclasses.replace(MIXED.training, steps=7),
    )
    assert config.identity_differences(changed, MIXED) == ["seed: 0 -> 3"]
    assert config.runtime_differences(changed, MIXED) == [
        "model.remat: False -> True",
        "training.steps: 2000 -> 7",
    ]
    other = dataclasses.replace(MIXED, model=dataclasses.replace(MIXED.model, pattern=(AttentionConfig(2),)))
    assert "model.pattern.0.type: 'HyenaConfig' -> 'AttentionConfig'" in config.identity_differences(
        other, MIXED
    )
    assert config.identity_differences(MIXED, MIXED) == config.runtime_differences(MIXED, MIXED) == []


def test_experiments_are_static_arguments():
    assert hash(MIXED) == hash(dataclasses.replace(MIXED))


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config(:", "SyntaxError"),
        ("x = 1", "AttributeError"),
        ("def get_config(): return 1", "must return an Experiment, got int"),
        ("import nothing_like_it", "ModuleNotFoundError"),
        ("import sys; sys.exit(7)", "SystemExit: 7"),
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config.ImplicitFilterConfig(emb_dim=4), "emb_dim must be odd and at least 3, got 4"),
        (lambda: HyenaConfig(order=0, gating="conv_first"), "order must be at least 1"),
        (
            lambda: LanguageModelConfig(pattern=(AttentionConfig(3),), d_model=8),
            "n_heads must be a divisor of d_model=8",
        ),
        (lambda: LanguageModelConfig(pattern=()), "pattern must be at least one mixer"),
        (lambda: LanguageModelConfig(dropout=1.0), "dropout must be in"),
        (lambda: config.OptimizerConfig(learning_rate=0.0), "learning_rate must be above 0"),
        (
            lambda: config.OptimizerConfig(warmup_steps=10, decay_steps=10),
            "decay_steps must be above warmup_steps=10",
        ),
        (lambda: config.TextConfig(tokenizer="bpe"), "tokenizer_path must be given exactly when"),
        (
            lambda: config.TextConfig(validation_path="x"),
            "validation_path must be given only together with path",
        ),
        (
            lambda: config.OptimizerConfig(learning_rate=1e-4),
            "final_learning_rate must be in 0..learning_rate=0.0001",
        ),
        (
            lambda: config.OptimizerConfig(learning_rate=float("nan")),
            "learning_rate must be above 0 and finite",
        ),
        (
            lambda: config.ParameterGroup("x", learning_rate=-1.0),
            "learning_rate of a group must be at least 0",
        ),
        (lambda: config.ImplicitFilterConfig(window_shift=float("inf")), "window_shift must be finite"),
        (lambda: config.TrainingConfig(steps=0), "steps must be at least 1"),
        (lambda: Experiment(seed=-1), "seed must be in"),
        (
            lambda: Experiment(data=config.TextConfig(seq_len=257)),
            "data.seq_len must be at most model.max_len=256, got 257",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(make, message):
    with pytest.raises(UserError, match=message):
        make()
