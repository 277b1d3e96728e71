"""Folders for transformers: what is written is read back to the bit, and what they cannot say is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from grid import in_grid
from references import params_of, source_of
from safetensors.numpy import load_file

import hyena_jax
from hyena_jax import cli
from hyena_jax.config import AttentionConfig, LanguageModelConfig
from hyena_jax.data.tokenizers import BpeTokenizer, IdsTokenizer
from hyena_jax.interop import lfm2, recurrentgemma, transformers_folder
from hyena_jax.system.errors import UserError


@pytest.mark.grid
@pytest.mark.parametrize("family", ["recurrentgemma", *in_grid("olmo_hybrid", "lfm2")])
def test_an_export_is_converted_to_the_same_bits(converted, tmp_path, family, capsys):
    """The window, of which transformers is told one more, comes back too."""
    run, folder = converted(family), tmp_path / "export"
    command = ["export", run, "--output", folder, "--format", "transformers", "--license", "apache-2.0"]
    assert cli.main(list(map(str, command))) == 0
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    card = (folder / "README.md").read_text()
    assert card.startswith('---\nlicense: "apache-2.0"\n')
    again = tmp_path / "again"
    max_len = hyena_jax.load_run(run).experiment.model.max_len
    assert cli.main(["convert", family, str(folder), "--output", str(again), "--max-len", str(max_len)]) == 0
    first, second = hyena_jax.load_run(run), hyena_jax.load_run(again)
    assert first.experiment == second.experiment
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
    assert first.folder.fingerprint in card
    assert "validation loss | not measured" in card
    assert cli.main(list(map(str, command))) == 2
    assert "new or an empty folder" in capsys.readouterr().err


def test_transformers_is_told_a_window_of_one_more(tmp_path):
    source, folder = source_of("recurrentgemma"), tmp_path / "export"
    transformers_folder.write(folder, source.model, params_of(source), IdsTokenizer(24), "card")
    values = json.loads((folder / "config.json").read_text())
    assert values["attention_window_size"] == 7
    assert values["intermediate_size"] == 48
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")


NO_FFN = {"ffn": "none", "d_ff": None, "ffn_bias": True}


def with_changes(model, **values):
    """Of the model, and of its mixers that have such a field."""
    pattern = tuple(
        dataclasses.replace(mixer, **{k: v for k, v in values.items() if hasattr(mixer, k)})
        for mixer in model.pattern
    )
    ours = {name: value for name, value in values.items() if hasattr(model, name)}
    return dataclasses.replace(model, pattern=pattern, **ours)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("recurrentgemma", {"soft_cap": None}, "model.soft_cap: 30.0 -> None"),
        ("recurrentgemma", {"tied_head": False}, "model.tied_head: True -> False"),
        ("recurrentgemma", {"ffn": "swiglu"}, "model.ffn: 'geglu' -> 'swiglu'"),
        ("recurrentgemma", {"norm": "layer"}, "model.norm: 'rms' -> 'layer'"),
        ("recurrentgemma", {"gate_blocks": 4}, "gate_blocks: 2 -> 4"),
        ("recurrentgemma", {"reset_at_start": False}, "reset_at_start: True -> False"),
        ("recurrentgemma", {"projection_bias": False}, "projection_bias: True -> False"),
        ("recurrentgemma", {"gelu": "erf"}, "gelu: 'tanh' -> 'erf'"),
        ("lfm2", {"scale_embedding": True}, "model.scale_embedding: False -> True"),
        ("lfm2", {"ffn_bias": True}, "model.ffn_bias: False -> True"),
        ("lfm2", {"qk_norm_eps": None}, "qk_norm_eps: 1e-05 -> None"),
        ("lfm2", {"out_bias": True}, "out_bias: False -> True"),
        ("lfm2", NO_FFN, "model.ffn must be 'swiglu' for transformers, got 'none'"),
        ("recurrentgemma", NO_FFN, "model.ffn must be 'geglu' for transformers, got 'none'"),
        ("olmo_hybrid", NO_FFN, "model.ffn must be 'swiglu' for transformers, got 'none'"),
        ("olmo_hybrid", {"norm_places": ("before",)}, r"model.norm_places\.3: 'after' -> 'before'"),
        ("olmo_hybrid", {"n_layers": 3}, "needs layers of gated_delta and of attention"),
        ("olmo_hybrid", {"factors": 2}, "factors: 1 -> 2"),
        ("olmo_hybrid", {"qk_norm": "head"}, "qk_norm: 'all' -> 'head'"),
    ],
)
def test_models_that_transformers_cannot_say(family, change, message):
    with pytest.raises(UserError, match=message):
        transformers_folder.settings_of(with_changes(source_of(family).model, **change))


def test_an_unrounded_scale_is_said_where_it_is_exact():
    model = source_of("recurrentgemma").model  # sqrt(16)
    transformers_folder.settings_of(dataclasses.replace(model, round_embedding_scale=False))
    wide = dataclasses.replace(model, d_model=24, round_embedding_scale=False)
    with pytest.raises(UserError, match="round_embedding_scale: True -> False"):
        transformers_folder.settings_of(wide)


def test_other_patterns_are_refused():
    model = LanguageModelConfig(pattern=(AttentionConfig(),), vocab_size=24)
    with pytest.raises(UserError, match="got a pattern of attention; --format safetensors writes any model"):
        transformers_folder.settings_of(model)


def test_a_model_card_is_next_to_a_file(converted, tmp_path, capsys):
    output = tmp_path / "model.safetensors"
    assert cli.main(["export", str(converted("lfm2")), "--output", str(output)]) == 0
    card = (tmp_path / "model.md").read_text()
    assert "| license | unknown |" in card
    assert "| exported on |" in card
    assert "| epsilon of its norms | rms 1e-05 |" in card
    output.unlink()
    (tmp_path / "model.json").unlink()
    assert cli.main(["export", str(converted("lfm2")), "--output", str(output)]) == 2
    assert "but model.md already exists" in capsys.readouterr().err


@pytest.mark.parametrize("bos", [None, 0])
def test_an_exported_tokenizer_adds_no_token_that_the_model_does_not_read(tmp_path, bos):
    from tokenizers import Tokenizer, models, processors

    made = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "a": 2}, []))
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 1)])
    encoding = BpeTokenizer(made.to_str(), bos)
    transformers_folder._write_tokenizer(tmp_path, encoding, None)
    exported = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert exported.encode("aa").ids == [*([] if bos is None else [bos]), 2, 2]
    with pytest.raises(UserError, match="bos must be None or an id below"):
        transformers_folder._write_tokenizer(tmp_path, BpeTokenizer(made.to_str(), 7), None)


@pytest.mark.parametrize("family", ["lfm2", "recurrentgemma"])
def test_the_end_of_texts_is_known_of_the_released_tokenizer_alone(family):
    model, module = source_of(family).model, {"lfm2": lfm2, "recurrentgemma": recurrentgemma}[family]
    released = dataclasses.replace(model, vocab_size=module.RELEASED_VOCABULARY)
    assert transformers_folder.end_of(model, module.BOS) is None
    assert transformers_folder.end_of(released, module.BOS) == module.ENDS["eos_token_id"]
    assert transformers_folder.end_of(released, None) is None
    assert transformers_folder.end_of(LanguageModelConfig(), module.BOS) is None
