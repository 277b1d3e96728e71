"""Other spellings of the same weights: prefixes, older config files, settings in a larger file."""

import json

import numpy as np
import pytest
from references import STORED

import hyena_jax
from hyena_jax.interop import lfm2, olmo_hybrid, recurrentgemma, safari
from hyena_jax.interop.family import Options, Settings
from hyena_jax.interop.tensors import Tensor, read_tensors
from hyena_jax.system.errors import UserError


def values_of(family: str) -> dict:
    return json.loads((STORED / family / "config.json").read_text())


def tensor_of(array) -> Tensor:
    return Tensor(array.shape, "F32", lambda: array)


def safari_of(tensors=None, **options):
    tensors = read_tensors(STORED / "safari") if tensors is None else tensors
    return safari.read(STORED / "safari", tensors, Options(**options))


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("part", ["mixer", "mixer.layer"])
def test_lightning_s_prefix_and_rematerialised_layers(prefix, part):
    tensors = read_tensors(STORED / "safari")
    renamed = {prefix + name.replace(".mixer.", f".{part}."): t for name, t in tensors.items()}
    assert safari_of(renamed).tensors.keys() == tensors.keys()


def test_names_with_and_without_a_prefix_are_refused():
    renamed = {f"model.{name}": tensor for name, tensor in read_tensors(STORED / "safari").items()}
    with pytest.raises(UserError, match="the tensor epoch is unexpected"):
        safari_of({**renamed, "epoch": tensor_of(np.zeros(()))})


@pytest.mark.parametrize("name", ["model", "model_config"])
def test_safari_s_config_may_be_a_part_of_a_file(tmp_path, name):
    (tmp_path / "all.json").write_text(json.dumps({name: values_of("safari"), "tokenizer_name": "gpt2"}))
    model = safari_of(config=tmp_path / "all.json").model
    assert model == safari_of().model
    assert (model.vocab_size, model.vocab_multiple) == (21, 8)  # without its padding


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


@pytest.mark.parametrize(
    ("values", "width"),
    [
        ({}, 24),  # the config says 30: int(2/3 of it), up to a multiple of 8
        ({"block_ffn_dim_multiplier": 2.0}, 40),
        ({"block_ffn_dim_multiplier": None}, 20),  # only a factor is rounded
        ({"intermediate_size": 6656, "block_multiple_of": 256}, 4608),  # the released 350M
        ({"intermediate_size": 4608, "block_auto_adjust_ff_dim": False}, 4608),
    ],
)
def test_the_width_of_lfm2_s_mlp_is_adjusted(values, width):
    assert lfm2.from_settings(Settings("x", values_of("lfm2") | values)).d_ff == width


def olmo_hybrid_of(tensors: dict) -> dict:
    """The tensors as `convert` reads them, by the names of its table."""
    folder = STORED / "olmo_hybrid"
    found = olmo_hybrid.read(folder, tensors, Options())
    return {name: tensor.read() for name, tensor in found.tensors.items()}


def test_olmo_hybrid_s_files_have_several_sets_of_names():
    """Those that transformers writes, those of its modules, and those of OLMo-core."""
    written = read_tensors(STORED / "olmo_hybrid")
    expected = olmo_hybrid_of(written)
    model = olmo_hybrid.from_settings(Settings("config.json", values_of("olmo_hybrid")))
    table = olmo_hybrid.transformers_table(model).transforms
    modules = {name for transform in table.values() for name in transform.names}
    assert expected.keys() == modules
    assert not any(name in written for name in modules if "input_layernorm" in name or ".conv1d." in name)
    own = {name: tensor_of(x) for name, x in expected.items()}
    core = {
        name.replace("linear_attn.o_proj", "linear_attn.out_proj").replace(".o_norm.", ".norm."): tensor
        for name, tensor in own.items()
    }
    assert core.keys() != own.keys()
    for tensors in (own, core):
        again = olmo_hybrid_of(tensors)
        assert again.keys() == modules
        for name, x in expected.items():
            np.testing.assert_array_equal(again[name], x)


@pytest.mark.parametrize(
    ("layer", "old", "new", "keeps", "message"),
    [
        (0, "attention_layer_norm", "input_layernorm", True, "must have one tensor {new}, got two by differ"),
        (0, "linear_attn.q_conv1d", "linear_attn.conv1d", True, "must have one tensor {new}, got"),
        (
            *(0, "attention_layer_norm", "post_feedforward_layernorm", False),
            "norms before gated delta layers and their MLPs, .*, got {layer} with linear_attn and post_feed",
        ),
        (
            *(3, "post_feedforward_layernorm", "attention_layer_norm", False),
            "norms after attention and their MLPs, .*, got {layer} with self_attn and input_layernorm",
        ),
    ],
)
def test_olmo_hybrid_s_names_that_are_unclear(layer, old, new, keeps, message):
    tensors, layer = dict(read_tensors(STORED / "olmo_hybrid")), f"model.layers.{layer}"
    old, new = f"{layer}.{old}.weight", f"{layer}.{new}.weight"
    tensors[new] = tensors[old] if keeps else tensors.pop(old)
    with pytest.raises(UserError, match=message.format(layer=layer, new=new)) as error:
        olmo_hybrid_of(tensors)
    assert "\n" not in str(error.value)


def test_olmo_hybrid_s_taps_of_several_widths():
    taps = {"model.layers.0.linear_attn.q_conv1d.weight": tensor_of(np.zeros((15, 1, 3)))}
    with pytest.raises(UserError, match="of one width and dtype, got"):
        olmo_hybrid_of({**read_tensors(STORED / "olmo_hybrid"), **taps})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_parameters": None}, "rope_parameters must be an object with rope_theta: null without rotary"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters must be an object with rope_theta"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters: rope_theta must be a number above 0"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type must be 'default'"),
        (
            {"linear_num_value_heads": 3},
            "num_value_heads must be a multiple of linear_num_key_heads=2, got 3",
        ),
        ({"layer_types": ["linear_attention"]}, "layer_types must be 4 layers, got 1"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"num_attention_heads": 3}, "num_attention_heads must be a divisor of 16, got 3"),
    ],
)
def test_olmo_hybrid_s_settings_that_are_unclear_or_not_supported(values, message):
    with pytest.raises(UserError, match=message):
        olmo_hybrid.from_settings(Settings("config.json", values_of("olmo_hybrid") | values))


def test_olmo_hybrid_may_have_rotary_positions_and_other_defaults():
    values = values_of("olmo_hybrid") | {"rope_parameters": {"rope_theta": 5e5}, "layer_types": None}
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    defaults = dict.fromkeys(f"linear_{size}" for size in sizes)
    model = olmo_hybrid.from_settings(Settings("config.json", values | defaults))
    delta, attention = model.pattern[0], model.pattern[3]
    assert (attention.rotary_fraction, attention.rotary_base) == (1.0, 5e5)
    assert (delta.n_heads, delta.key_dim, delta.value_dim) == (4, 3, 6)
    assert model.norm_places == ("before", "before", "before", "after")


def test_the_7b_of_olmo_hybrid_is_the_preset():
    sizes = {"vocab_size": 100_352, "hidden_size": 3840, "intermediate_size": 11_008}
    sizes |= {"num_hidden_layers": 32, "num_attention_heads": 30}
    values = {"model_type": "olmo_hybrid", "rope_parameters": {"rope_theta": None}, **sizes}
    ours = olmo_hybrid.to_settings(olmo_hybrid.from_settings(Settings("config.json", values)))
    preset = hyena_jax.load_config("olmo_hybrid").model
    assert ours | {"max_position_embeddings": 4096} == olmo_hybrid.to_settings(preset)
