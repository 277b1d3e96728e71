"""Sources that are damaged, contradictory or hostile: one line, exit code 2, and nothing is written."""

import json
import os
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hyena_jax import cli


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
    ],
)
def test_configs_that_contradict_the_tensors(stored, refused, values, message):
    """`auto_map`, which names code to run, is never read."""
    folder = settings(stored("lfm2"), auto_map={"AutoModel": "evil.Model"}, **values)
    assert message in refused("lfm2", folder)


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
