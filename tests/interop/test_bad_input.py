"""Sources that are damaged, contradictory or hostile: one line, exit code 2, and nothing is written."""

import json
import os
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from references import STORED, params_of, source_of
from safetensors.numpy import load_file, save_file

from hyena_jax import cli
from hyena_jax.config import AttentionConfig
from hyena_jax.interop import lfm2, safari
from hyena_jax.interop.family import Settings
from hyena_jax.interop.tensors import read_tensors


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
    """Rewrites the weights; `change` gets the tensors by name, or is a table of new ones, of which None is
    none and a function makes it of the old one."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if callable(change):
        change(tensors)
    else:
        tensors |= {name: new(tensors[name]) if callable(new) else new for name, new in change.items()}
    save_file({name: x for name, x in tensors.items() if x is not None}, path)
    return folder


def settings(folder, **values):
    """Rewrites the config: `...` leaves a setting out, and those of the layer are changed one by one."""
    path = folder / "config.json"
    found = json.loads(path.read_text())
    for name, value in values.items():
        found[name] = found[name] | value if name == "layer" else value
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not ...}))
    return folder


NORM = "model.layers.0.operator_norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DELTAS = "backbone.layers.0.mixer.filter_fn.modulation.deltas"
FREQUENCIES = "backbone.layers.1.mixer.filter_fn.implicit_filter.5.freq"
MORE = np.zeros(3, np.float32)


def not_finite(tensors):
    tensors[QUERY][3, 2] = np.inf


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("lfm2", lambda t: t.update(other=t.pop(NORM)), rf"the tensor {NORM} \(16,\) is missing; .*other"),
        ("lfm2", {NORM: lambda x: x[:-1]}, rf"the tensor {NORM} must be \(16,\) by the config"),
        ("lfm2", {NORM: np.int32}, rf"{NORM} must be of dtype .*, got I32"),
        ("lfm2", not_finite, f"the tensor {QUERY} must be finite as float32"),
        ("lfm2", lambda t: t.update({HEAD: t[EMBEDDING] + 1}), f"the tensor {HEAD} must equal {EMBEDDING}"),
        ("lfm2", lambda t: t.update({HEAD: t.pop(EMBEDDING)}), rf"{EMBEDDING} \(24, 16\) is missing"),
        (
            "lfm2",
            lambda t: t.update({HEAD: t[EMBEDDING], EMBEDDING: t[EMBEDDING].astype(np.int8)}),
            f"{EMBEDDING} must be of dtype .*, got I8",
        ),
        ("rwkv7", {"blocks.1.att.v1": None}, "the tensor blocks.1.att.v1 is missing, whose"),
        ("rwkv7", {"blocks.0.att.r_k": np.zeros((5, 2), np.float32)}, "n_heads .*5"),
        ("rwkv7", {"blocks.0.att.g1": MORE}, "att.g1 must be of 2 axes"),
        ("hyenadna", {"head.output_transform.bias": MORE}, "tensor must be no classifier's"),
    ],
)
def test_tensors_that_do_not_fit_are_named(stored, refused, family, change, message):
    assert re.search(message, refused(family, changed(stored(family), change)))


def test_constants_and_shared_tensors_of_filters_are_compared(stored, refused):
    change = {DELTAS: lambda x: 2 * x, FREQUENCIES: lambda x: x + 1}
    error = refused("hyenadna", changed(stored("hyenadna"), change))
    assert f"{DELTAS} must be the constant that the config implies" in error
    assert f"{FREQUENCIES} must equal" in error


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("lfm2", {"num_hidden_layers": None}, "config.json: num_hidden_layers is missing"),
        ("lfm2", {"hidden_size": "16"}, "config.json: hidden_size must be an int, at least 1, got '16'"),
        ("lfm2", {"conv_bias": True}, "config.json: conv_bias must be False: no other is supported, got Tr"),
        ("lfm2", {"model_type": "llama"}, "config.json: model_type must be 'lfm2': no other is supported"),
        ("lfm2", {"layer_types": ["conv"]}, "config.json: layer_types must be 3 layers, got 1"),
        ("lfm2", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default'"),
        ("lfm2", {"rope_parameters": {"type": "linear", "factor": 4.0}}, "type must be 'default'"),
        ("lfm2", {"rope_parameters": {"full_attention": {}}}, "rope_parameters: full_attention must be None"),
        ("lfm2", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be at most 1024, got 2147"),
        ("lfm2", {"hidden_size": 10**3000}, "config.json: hidden_size must be at most 1048576, got 1000"),
        # The names of many more layers than the file has: compared before a model of that size is traced.
        (
            "lfm2",
            {"num_hidden_layers": 1024, "layer_types": ["conv"] * 1024},
            "model.layers.3.ffn_norm.weight and 8,166 more are m",
        ),
        ("rwkv7", {"head_dim": 5}, "config.json: head_dim must be a divisor of hidden_size=12, got 5"),
        ("rwkv7", {"value_dim": [24, 12, 12]}, "value_dim must be hidden_size=12 in all layers"),
        ("rwkv7", {"hidden_act": "silu"}, "config.json: hidden_act must be 'sqrelu'"),
        *(
            ("hyenadna", {"layer": {"shift": x}}, f"layer: shift must be a number of at least 0, got {x!r}")
            for x in ([0], "x", "0.05", True, -1)
        ),
        ("hyenadna", {"layer": {"order": 3}}, "order must be 2"),
        # Features of 4 TB, which are never computed.
        (
            "safari",
            {"layer": {"l_max": 2**23, "emb_dim": 65535}},
            "pos_emb.z must be (1, 8388608, 65535) by the config, got (1, 24, 5)",
        ),
        # What vortex takes for other settings.
        ("stripedhyena2", {"interleave": ...}, "interleave is missing"),
        ("stripedhyena2", {"column_split_hyena": ...}, "column_split_hyena is missing"),
        ("stripedhyena2", {"long_fir_threshold": 8}, "long_fir_threshold must be None"),
    ],
)
def test_configs_that_contradict_the_tensors(stored, refused, family, values, message):
    """`auto_map`, which names code to run, is never read."""
    folder = stored("rwkv7_transformers" if family == "rwkv7" else family)
    assert message in refused(family, settings(folder, auto_map={"AutoModel": "evil.Model"}, **values))


@pytest.mark.parametrize(("layer", "option"), [({"shift": 0}, None), ({}, 0.0)])
def test_a_shift_of_0_is_one(stored, layer, option):
    folder = settings(stored("hyenadna"), layer=layer)
    model = source_of("hyenadna", folder, window_shift=option).model
    assert model.pattern[0].filter.window_shift == 0


def test_the_epsilon_of_norms_is_that_of_the_config(stored):
    folder = settings(stored("olmo_hybrid"), rms_norm_eps=1e-3)
    assert source_of("olmo_hybrid", folder).model.norm_eps == 1e-3


def test_skips_of_several_filters_are_stored_channel_by_channel():
    skip = safari._skip("bias", 3, 2)  # channel 0 has 0 and 1
    found = skip.read(np.arange(6.0))
    np.testing.assert_array_equal(found, [[0, 2, 4], [1, 3, 5]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!bool x", "not YAML: KeyError: 'x'"),
        ("a: [", "not YAML: ParserError"),
        ("a: &a [1]\nb: *a", "YAML with aliases is not supported"),
        (f"a: {'[' * 2_000}", "YAML must be at most"),
        ("[1, 2]", "must be an object with settings by name, got [1, 2]"),
        (f"interleave: 0x{'f' * 9999}", "interleave must be True: no other is supported, got a long int"),
        (f"interleave: [{'[1],' * 99}]", "got [[1], [1], [1], [1], [1], [1], ...]"),
    ],
    ids=lambda text: text[:30],
)
def test_yaml_that_python_cannot_read_or_write(stored, refused, text, message):
    folder = stored("stripedhyena2")
    (folder / "config.yml").write_text(text)
    assert message in refused("stripedhyena2", folder)


def test_the_older_name_of_the_rotary_base():
    values = json.loads((STORED / "lfm2" / "config.json").read_text())
    del values["rope_parameters"]
    model = lfm2.from_settings(Settings("config.json", values | {"theta": 1e4, "rope_theta": 1e5}))
    assert {mixer.rotary_base for mixer in model.pattern if isinstance(mixer, AttentionConfig)} == {1e4}


def test_metadata_of_null_is_none(stored):
    path = stored("recurrentgemma") / "model.safetensors"
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:size]) | {"__metadata__": None}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[size:])
    tensors = load_file(STORED / "recurrentgemma" / "model.safetensors")
    found = read_tensors(path)
    assert found.keys() == tensors.keys()
    assert all((found[name].read() == tensor).all() for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "about", [{}, [], {"shape": [1], "chunks": [1]}, {"shape": 1, "chunks": 1, "dtype": 1}]
)
def test_arrays_of_orbax_without_a_shape(tmp_path, refused, about):
    folder = tmp_path / "orbax"
    (folder / "a").mkdir(parents=True)
    (folder / "checkpoint").touch()
    (folder / "a" / ".zarray").write_text(json.dumps(about))
    assert "cannot be read" in refused("recurrentgemma", folder)


def test_files_that_are_not_whole_or_not_there_or_links(stored, refused, tmp_path):
    folder = stored("lfm2")
    path, config, elsewhere = folder / "model.safetensors", folder / "config.json", folder / "elsewhere"
    for linked in (path, config):
        os.rename(linked, elsewhere)
        os.symlink("elsewhere", linked)
        assert "must be a file, not a symbolic link" in refused("lfm2", folder)
        os.replace(elsewhere, linked)
    path.write_bytes(path.read_bytes()[:-10])
    assert "cannot be read" in refused("lfm2", folder)
    (folder / "config.json").write_text("{")
    assert "cannot be read" in refused("lfm2", folder)
    assert "holds no weights" in refused("lfm2", tmp_path)


@pytest.mark.parametrize("file", ["../lfm2/model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors"])
def test_an_index_names_files_of_its_folder_alone(stored, refused, file):
    folder = stored("lfm2")
    index = {"weight_map": {NORM: file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "must be the name of a file in its folder" in refused("lfm2", folder)


def test_files_of_an_index_hold_what_it_says(stored, refused):
    folder = stored("lfm2")
    names = list(load_file(folder / "model.safetensors"))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "other"], "model.safetensors")}))
    assert "names the tensor other, which is not in the files" in refused("lfm2", folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert read_tensors(folder).keys() == {*names}
    shutil.copy(folder / "model.safetensors", folder / "more.safetensors")
    both = dict.fromkeys(names, "model.safetensors") | {names[0]: "more.safetensors"}
    index.write_text(json.dumps({"weight_map": both}))
    assert "which another file holds too" in refused("lfm2", folder)


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


@pytest.mark.parametrize(
    ("family", "flags", "message"),
    [
        ("lfm2", "--window-shift 0", "only hyenadna has such a window"),
        ("hyenadna", "--window-of deepmind", "only recurrentgemma has such a window"),
        ("safari", "--max-len 48", "24, of which the filters are functions"),
        ("hyenadna", "--tokenizer tokenizer.json", "the tokens of this family are known"),
    ],
)
def test_options_of_other_families(refused, family, flags, message):
    assert message in refused(family, STORED / family, *flags.split())


def test_bfloat16_is_read_exactly(stored):
    tensors = load_file(STORED / "lfm2" / "model.safetensors")
    narrow = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    params = params_of(source_of("lfm2", changed(stored("lfm2"), narrow)))
    for found, name in (
        (params["embedding"]["embedding"], EMBEDDING),
        (1 + params["blocks_0"]["mixer_norm"]["scale"], NORM),
    ):
        np.testing.assert_array_equal(found, narrow[name].astype(np.float32))
