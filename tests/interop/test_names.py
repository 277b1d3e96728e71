"""Other spellings of the same weights: prefixes, older config files, settings in a larger file."""

import json

import numpy as np
import pytest
from references import STORED
from safetensors.numpy import load_file

from hyena_jax.config import UserError
from hyena_jax.interop import lfm2, recurrentgemma, safari
from hyena_jax.interop.family import Options
from hyena_jax.interop.settings import Settings
from hyena_jax.interop.tensors import Tensor, read_tensors


def values_of(family: str) -> dict:
    return json.loads((STORED / family / "config.json").read_text())


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("part", ["mixer", "mixer.layer"])
def test_lightning_s_prefix_and_rematerialised_layers(prefix, part):
    tensors = read_tensors(STORED / "safari")
    renamed = {prefix + name.replace(".mixer.", f".{part}."): t for name, t in tensors.items()}
    found = safari.read(STORED / "safari", renamed, Options())
    assert found.tensors.keys() == tensors.keys()


def test_names_with_and_without_a_prefix_are_refused():
    tensors = read_tensors(STORED / "safari")
    renamed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    with pytest.raises(UserError, match="the tensor epoch is unexpected"):
        safari.read(
            STORED / "safari", {**renamed, "epoch": Tensor((), "F32", lambda: np.zeros(()))}, Options()
        )


@pytest.mark.parametrize("name", ["model", "model_config"])
def test_safari_s_config_may_be_a_part_of_a_file(tmp_path, name):
    (tmp_path / "all.json").write_text(json.dumps({name: values_of("safari"), "tokenizer_name": "gpt2"}))
    tensors = read_tensors(STORED / "safari")
    options = Options(config=tmp_path / "all.json")
    found = safari.read(STORED / "safari", tensors, options).model
    assert found == safari.read(STORED / "safari", tensors, Options()).model


def test_the_vocabulary_is_without_its_padding():
    model = safari.read(STORED / "safari", read_tensors(STORED / "safari"), Options()).model
    assert (model.vocab_size, model.vocab_multiple) == (21, 8)


def test_deltas_are_stored_where_they_have_no_effect():
    names = load_file(STORED / "safari" / "model.safetensors").keys()
    assert "backbone.layers.0.mixer.filter_fn.modulation.deltas" in names


def test_recurrentgemma_s_older_files_have_the_rotary_settings_at_the_top():
    values = values_of("recurrentgemma")
    rope = values.pop("rope_parameters")
    older = {**values, "rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.5}
    theirs = recurrentgemma.from_settings(Settings("config.json", older))
    assert theirs == recurrentgemma.from_settings(Settings("config.json", values_of("recurrentgemma")))


def test_recurrentgemma_s_intermediate_size_is_twice_the_width():
    assert recurrentgemma.from_settings(Settings("x", values_of("recurrentgemma"))).d_ff == 24
    with pytest.raises(UserError, match="intermediate_size must be even"):
        recurrentgemma.from_settings(Settings("x", values_of("recurrentgemma") | {"intermediate_size": 47}))


def test_lfm2_s_older_files_list_the_layers_of_attention():
    values = values_of("lfm2")
    older = {**values, "layer_types": None, "full_attn_idxs": [1], "block_ff_dim": 30, "intermediate_size": 9}
    assert lfm2.from_settings(Settings("x", older)) == lfm2.from_settings(Settings("x", values))


def test_the_width_of_lfm2_350m():
    values = values_of("lfm2") | {"intermediate_size": 6656, "block_multiple_of": 256}
    assert lfm2.from_settings(Settings("x", values)).d_ff == 4608
    adjusted = values | {"intermediate_size": 4608, "block_auto_adjust_ff_dim": False}
    assert lfm2.from_settings(Settings("x", adjusted)).d_ff == 4608
