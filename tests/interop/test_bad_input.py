"""Sources that are damaged, contradictory or hostile: one line, exit code 2, and nothing is written."""

import json
import os
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hyena_jax import cli
from hyena_jax.config import AttentionConfig, HyenaConfig, ImplicitFilterConfig, LanguageModelConfig
from hyena_jax.interop import lfm2, safari
from hyena_jax.interop.family import Settings


@pytest.fixture
def refused(tmp_path, capsys):
    """refused(family, source, *flags) -> the one line of the error."""

    def run(family, source, *flags):
        before = sorted(tmp_path.iterdir())
        output = tmp_path / "runs" / "run"
        assert cli.main(["convert", family, str(source), "--output", str(output), *flags]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert sorted(tmp_path.iterdir()) == before
        return error

    return run


def changed(folder, change):
    """Rewrites the weights; `change` gets the tensors by name."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return folder


def settings(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


NORM = "model.layers.0.operator_norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def not_finite(tensors):
    tensors[QUERY][3, 2] = np.inf


def a_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update(other=t.pop(NORM)),
            rf"the tensor {NORM} \(16,\) is missing; .*other",
        ),
        (lambda t: t.update({NORM: t[NORM][:-1]}), rf"the tensor {NORM} must be \(16,\) by the config"),
        (lambda t: t.update({NORM: t[NORM].astype(np.int32)}), rf"{NORM} must be of dtype .*, got I32"),
        (not_finite, f"the tensor {QUERY} must be finite as float32"),
        (a_head, "the tensor lm_head.weight must equal model.embed_tokens.weight"),
        (
            lambda t: t.update({"lm_head.weight": t.pop(EMBEDDING)}),
            rf"the tensor {EMBEDDING} \(24, 16\) is missing",
        ),
        (
            lambda t: t.update({"lm_head.weight": t[EMBEDDING], EMBEDDING: t[EMBEDDING].astype(np.int8)}),
            f"{EMBEDDING} must be of dtype .*, got I8",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(stored, refused, change, message):
    assert re.search(message, refused("lfm2", changed(stored("lfm2"), change)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": None}, "config.json: num_hidden_layers is missing"),
        ({"hidden_size": "16"}, "config.json: hidden_size must be an int, at least 1, got '16'"),
        ({"hidden_size": 32}, "the tensor model.embed_tokens.weight must be (24, 32) by the config"),
        ({"conv_bias": True}, "config.json: conv_bias must be False: no other is supported, got True"),
        ({"model_type": "llama"}, "config.json: model_type must be 'lfm2': no other is supported"),
        ({"layer_types": ["conv"]}, "config.json: layer_types must be 3 layers, got 1"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default'"),
        ({"rope_parameters": {"type": "linear", "factor": 4.0}}, "type must be 'default'"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters: full_attention must be None"),
        ({"intermediate_size": None}, "config.json: intermediate_size is missing"),
        ({"num_hidden_layers": 2**31 - 1}, "config.json: num_hidden_layers must be at most 1024, got 2147"),
        ({"hidden_size": 10**3000}, "config.json: hidden_size must be at most 1048576, got 1000"),
    ],
)
def test_configs_that_contradict_the_tensors(stored, refused, values, message):
    """`auto_map`, which names code to run, is never read."""
    folder = settings(stored("lfm2"), auto_map={"AutoModel": "evil.Model"}, **values)
    assert message in refused("lfm2", folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("blocks.1.att.v1"),
            "the tensor blocks.1.att.v1 is missing, whose",
        ),
        (lambda t: t.pop("blocks.2.att.x_g"), r"the tensor blocks.2.att.x_g \(1, 1, 12\) is missing"),
        (
            lambda t: t.update({"ln_out.bias": np.zeros(3, np.float32)}),
            r"ln_out.bias must be \(12,\) by",
        ),
        (lambda t: t.update(more=np.zeros(3, np.float32)), r"the tensor more \(3,\) is unexpected"),
        (lambda t: t.update({"blocks.0.att.r_k": np.zeros((5, 2), np.float32)}), "n_heads .*5"),
        (
            lambda t: t.update({"blocks.0.att.g1": np.zeros(12, np.float32)}),
            "att.g1 must be of 2 axes",
        ),
    ],
)
def test_names_and_shapes_of_rwkv7(stored, refused, change, message):
    assert re.search(message, refused("rwkv7", changed(stored("rwkv7"), change)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head_dim": 5}, "config.json: head_dim must be a divisor of hidden_size=12, got 5"),
        ({"value_dim": [24, 12, 12]}, "config.json: value_dim must be hidden_size=12 in all layers"),
        ({"decay_low_rank_dim": 4}, "w_lora.lora.0.weight must be (4, 12) by the config, got (3, 12)"),
        ({"hidden_act": "silu"}, "config.json: hidden_act must be 'sqrelu'"),
    ],
)
def test_configs_of_rwkv7_that_contradict_the_tensors(stored, refused, values, message):
    assert message in refused("rwkv7", settings(stored("rwkv7_transformers"), **values))


def test_many_more_layers_than_the_file_has(stored, refused):
    """Their names are compared before a model of that size is traced."""
    folder = settings(stored("lfm2"), num_hidden_layers=1024, layer_types=["conv"] * 1024)
    error = refused("lfm2", folder)
    assert "does not fit its config: the tensors model.layers.1.conv" in error
    assert "more are missing" in error


@pytest.mark.parametrize("shift", [[0], "x", "0.05", True, -1])
def test_the_window_s_shift_is_a_number(stored, refused, shift):
    folder = stored("hyenadna")
    layer = json.loads((folder / "config.json").read_text())["layer"]
    error = refused("hyenadna", settings(folder, layer={**layer, "shift": shift}))
    assert f"config.json: layer: shift must be a number of at least 0, got {shift!r}" in error


def test_a_shift_of_0_is_one(stored, tmp_path):
    folder = stored("hyenadna")
    layer = json.loads((folder / "config.json").read_text())["layer"]
    settings(folder, layer={**layer, "shift": 0})
    assert cli.main(["convert", "hyenadna", str(folder), "--output", str(tmp_path / "run")]) == 0


def test_features_that_do_not_fit_are_never_computed(stored, refused):
    """They would have 4 TB."""
    folder = stored("safari")
    layer = json.loads((folder / "config.json").read_text())["layer"]
    error = refused("safari", settings(folder, layer={**layer, "l_max": 2**23, "emb_dim": 65535}))
    assert "pos_emb.z must be (1, 8388608, 65535) by the config, got (1, 24, 5)" in error


def test_layers_share_the_times_of_their_filters():
    mixer = HyenaConfig(filter=ImplicitFilterConfig(emb_dim=5, width=8))
    table = safari._table(LanguageModelConfig(pattern=(mixer,), n_layers=3, d_ff=8, vocab_size=12))
    assert len(table.constants) == 6
    assert len({id(array) for array in table.constants.values()}) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!bool x", "not YAML: KeyError: 'x'"),
        ("a: !!timestamp x", "not YAML: AttributeError"),
        ("a: !!int ''", "not YAML: IndexError"),
        ("a: [", "not YAML: ParserError"),
        ("a: &a [1]\nb: *a", "YAML with aliases is not supported"),
        (f"a: {'[' * 20_000}", "YAML must be at most"),
        ("[1, 2]", "must be an object with settings by name, got [1, 2]"),
        (f"interleave: 0x{'f' * 9999}", "interleave must be True: no other is supported, got a long int"),
        (f"interleave: [{'[1],' * 9999}]", "got [[1], [1], [1], [1], [1], [1], ...]"),
    ],
)
def test_yaml_that_python_cannot_read_or_write(stored, refused, text, message):
    folder = stored("stripedhyena2")
    (folder / "config.yml").write_text(text)
    assert message in refused("stripedhyena2", folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop("interleave"), "interleave is missing"),
        (lambda values: values.pop("column_split_hyena"), "column_split_hyena is missing"),
        (lambda values: values.update(long_fir_threshold=8), "long_fir_threshold must be None"),
    ],
)
def test_settings_that_vortex_takes_for_others(stored, refused, change, message):
    folder = stored("stripedhyena2")
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))
    assert message in refused("stripedhyena2", folder)


def test_the_older_name_of_the_rotary_base(stored):
    values = json.loads((stored("lfm2") / "config.json").read_text())
    del values["rope_parameters"]
    model = lfm2.from_settings(Settings("config.json", values | {"theta": 1e4, "rope_theta": 1e5}))
    assert {mixer.rotary_base for mixer in model.pattern if isinstance(mixer, AttentionConfig)} == {1e4}


def test_metadata_of_null_is_none(stored, tmp_path):
    folder = stored("recurrentgemma")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:size]) | {"__metadata__": None}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[size:])
    assert cli.main(["convert", "recurrentgemma", str(folder), "--output", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    "about", [{}, [], {"shape": [1], "chunks": [1]}, {"shape": 1, "chunks": 1, "dtype": 1}]
)
def test_arrays_of_orbax_without_a_shape(tmp_path, refused, about):
    folder = tmp_path / "orbax"
    (folder / "a").mkdir(parents=True)
    (folder / "checkpoint").touch()
    (folder / "a" / ".zarray").write_text(json.dumps(about))
    assert "cannot be read" in refused("recurrentgemma", folder)


def test_truncated_files(stored, refused):
    folder = stored("lfm2")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "cannot be read" in refused("lfm2", folder)
    (folder / "config.json").write_text("{")
    assert "cannot be read" in refused("lfm2", folder)
    assert "holds no weights" in refused("lfm2", folder.parent / "lfm2" / "..")


@pytest.mark.parametrize("file", ["../lfm2/model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors"])
def test_an_index_names_files_of_its_folder_alone(stored, refused, file):
    folder = stored("lfm2")
    index = {"weight_map": {NORM: file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "must be the name of a file in its folder" in refused("lfm2", folder)


def test_files_of_an_index_hold_what_it_says(stored, refused, tmp_path):
    folder = stored("lfm2")
    names = list(load_file(folder / "model.safetensors"))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "other"], "model.safetensors")}))
    assert "names the tensor other, which is not in the files" in refused("lfm2", folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    output = tmp_path / "run"
    assert cli.main(["convert", "lfm2", str(folder), "--output", str(output)]) == 0


def test_symbolic_links_are_refused(stored, refused):
    folder = stored("lfm2")
    os.rename(folder / "model.safetensors", folder / "weights")
    os.symlink("weights", folder / "model.safetensors")
    assert "must be a file, not a symbolic link" in refused("lfm2", folder)


def test_the_output_is_a_new_folder(stored, refused, tmp_path):
    output = tmp_path / "runs" / "run"
    output.mkdir(parents=True)
    (output / "file").touch()
    assert "--output must be a new or an empty folder" in refused("lfm2", stored("lfm2"))


def test_a_tokenizer_of_another_size(stored, refused):
    from tokenizers import Tokenizer, models

    folder = stored("lfm2")
    vocabulary = {chr(97 + i): i for i in range(26)}
    Tokenizer(models.BPE(vocabulary, [])).save(str(folder / "tokenizer.json"))
    assert "the size of the tokenizer (bpe) must be at most the model's 24, got 26" in refused("lfm2", folder)
    settings(folder, bos_token_id=999)
    assert "bos must be None or an id below vocab_size=26" in refused("lfm2", folder)


def test_options_of_other_families(stored, refused):
    assert "only hyenadna has such a window" in refused("lfm2", stored("lfm2"), "--window-shift", "0")
    assert "24, of which the filters are functions" in refused("safari", stored("safari"), "--max-len", "48")
    assert "the tokens of this family are known" in refused(
        "hyenadna", stored("hyenadna"), "--tokenizer", "tokenizer.json"
    )


def test_another_window_than_the_config_s_is_refused(stored, refused):
    def other(tensors):
        tensors["backbone.layers.0.mixer.filter_fn.modulation.deltas"] *= 2

    folder = changed(stored("hyenadna"), other)
    assert "modulation.deltas must be the constant that the config implies" in refused("hyenadna", folder)


def test_a_classifier_is_not_a_language_model(stored, refused):
    folder = changed(stored("hyenadna"), lambda t: t.update({"head.output_transform.bias": np.zeros(2)}))
    assert "tensor must be no classifier's" in refused("hyenadna", folder)


def test_frequencies_that_layers_share_must_be_equal(stored, refused):
    name = "backbone.layers.1.mixer.filter_fn.implicit_filter.5.freq"
    folder = changed(stored("safari"), lambda t: t.update({name: t[name] + 1}))
    assert f"the tensor {name} must equal" in refused("safari", folder)


def test_the_order_of_hyenadna_s_filters_is_known_for_two(stored, refused):
    folder = stored("hyenadna")
    layer = json.loads((folder / "config.json").read_text())["layer"]
    assert "order must be 2" in refused("hyenadna", settings(folder, layer={**layer, "order": 3}))


def test_poles_that_grow_are_not_finite_rates(stored, refused):
    name = "blocks.2.filter.log_poles"
    folder = changed(stored("stripedhyena2"), lambda t: t.update({name: -t[name]}))
    assert f"the tensor {name} must be finite" in refused("stripedhyena2", folder)


def test_bfloat16_is_read_exactly(stored, tmp_path):
    import hyena_jax

    def narrow(tensors):
        tensors |= {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}

    folder = changed(stored("lfm2"), narrow)
    assert cli.main(["convert", "lfm2", str(folder), "--output", str(tmp_path / "run")]) == 0
    params = hyena_jax.load_run(tmp_path / "run").params
    tensors = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(
        params["embedding"]["embedding"], tensors["model.embed_tokens.weight"].astype(np.float32)
    )
    np.testing.assert_array_equal(
        1 + params["blocks_0"]["mixer_norm"]["scale"], tensors[NORM].astype(np.float32)
    )
