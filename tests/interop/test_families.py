"""Tiny models of the public references, stored with their logits: see `make_references.py`."""

import dataclasses

import grouped_heads
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import unflatten_dict
from grid import grid_but, in_grid
from references import STORED, expected, logits_of
from safetensors.numpy import load_file, save_file

import hyena_jax
from hyena_jax import cli, models
from hyena_jax.config import HawkConfig
from hyena_jax.interop import recurrentgemma, rwkv7
from hyena_jax.interop.convert import FORMATS, convert
from hyena_jax.interop.family import Options, Settings
from hyena_jax.interop.tensors import read_tensors
from hyena_jax.system.errors import UserError
from hyena_jax.system.trees import named_leaves

MOST = 1e-4
"""Largest difference of logits in float32; the largest logits are between 2 and 13."""


def with_window(run, change):
    """The model of a run with another window of attention."""
    pattern = tuple(
        mixer if isinstance(mixer, HawkConfig) else dataclasses.replace(mixer, window=mixer.window + change)
        for mixer in run.experiment.model.pattern
    )
    return models.build(dataclasses.replace(run.experiment.model, pattern=pattern))


BOTH_LENGTHS = pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.grid), 1])


@BOTH_LENGTHS
@pytest.mark.parametrize(
    "family",
    [
        *("lfm2", "olmo_hybrid", "stripedhyena2", "rwkv7"),
        *in_grid("safari", "hyenadna", "rwkv7_transformers"),
    ],
)
def test_logits_are_the_reference_s(converted, family, which):
    run = hyena_jax.load_run(converted(family))
    tokens, logits = expected(family)[which]
    found = logits_of(run.model, run.params, tokens)
    assert found.shape[-1] == logits.shape[-1]  # no padding of the vocabulary
    assert np.abs(found[:, -logits.shape[1] :] - logits).max() < MOST


@pytest.mark.grid
def test_recurrentgemma_has_three_windows_for_one_number(converted):
    """transformers shows a token `attention_window_size` - 1 earlier ones, DeepMind's code, by which the
    weights were trained, `attention_window_size`."""
    run = hyena_jax.load_run(converted("recurrentgemma"))
    attention = next(mixer for mixer in run.experiment.model.pattern if not isinstance(mixer, HawkConfig))
    assert attention.window == 6
    tokens, logits = expected("recurrentgemma")[1]
    narrow = with_window(run, -1)
    assert np.abs(logits_of(narrow, run.params, tokens) - logits).max() < MOST
    differences = np.abs(logits_of(run.model, run.params, tokens) - logits).max(axis=(0, 2))
    assert differences[:6].max() < MOST
    assert differences[6:].max() > 0.01


def flax_folder(folder):
    """The stored parameters of DeepMind's code as it saves them: block keys are literally `blocks.0`."""
    with np.load(STORED / "recurrentgemma_flax" / "params.npz") as file:
        tree = unflatten_dict(dict(file), sep="/")
    ocp.PyTreeCheckpointer().save(folder, {"params": tree})
    return folder


@BOTH_LENGTHS
def test_recurrentgemma_of_deepmind_s_flax_code(tmp_path, which):
    convert("recurrentgemma", flax_folder(tmp_path / "2b"), tmp_path / "run", Options(max_len=32))
    run = hyena_jax.load_run(tmp_path / "run")
    assert run.experiment.model.max_len == 32
    tokens, logits = expected("recurrentgemma_flax")[which]
    assert np.abs(logits_of(run.model, run.params, tokens) - logits).max() < MOST


@pytest.mark.grid
@pytest.mark.parametrize("family", grid_but(FORMATS, "recurrentgemma", "stripedhyena2"))
def test_every_tensor_is_used_and_read_back(converted, family):
    """What the table writes is what it read; poles and factors of norms are computed and may be rounded."""
    run = hyena_jax.load_run(converted(family))
    found = FORMATS[family](STORED / family, read_tensors(STORED / family), Options())
    leaves = named_leaves(run.params)
    for path, transform in found.table.transforms.items():
        for name, tensor in zip(transform.names, transform.write(leaves[path]), strict=True):
            theirs = found.tensors[name].read()
            np.testing.assert_allclose(tensor, theirs, rtol=2e-6, atol=1e-7, err_msg=name)


def test_a_converted_run_has_no_text_of_its_own(converted):
    run = hyena_jax.load_run(converted("lfm2"))
    with pytest.raises(UserError, match="path must be the text to measure on, as the run was converted"):
        run.evaluate()


@pytest.mark.grid
def test_the_optimizer_s_state_is_that_of_a_new_run(converted):
    from hyena_jax.training.checkpoint import Checkpoints
    from hyena_jax.training.optimizer import make_optimizer
    from hyena_jax.training.step import init_state

    folder = converted("lfm2")
    run = hyena_jax.load_run(folder)
    optimizer = make_optimizer(run.experiment.optimizer, run.params, run.experiment.training.steps)
    state = jax.device_get(init_state(run.params, optimizer))
    with Checkpoints(folder / "checkpoints", 1, print) as checkpoints:
        restored = checkpoints.restore(state.to_items())
    jax.tree.map(np.testing.assert_array_equal, restored.items, state.to_items())
    assert restored.meta.to_json() == {"step": 0, "loss": None}


@pytest.mark.grid
def test_rwkv7_s_tensors_of_transformers_are_used_and_read_back(converted):
    run = hyena_jax.load_run(converted("rwkv7_transformers"))
    stored, leaves = load_file(STORED / "rwkv7_transformers" / "model.safetensors"), named_leaves(run.params)
    transforms = rwkv7.transformers_table(run.experiment.model).transforms
    for path, transform in transforms.items():
        for name, tensor in zip(transform.names, transform.write(leaves[path]), strict=True):
            np.testing.assert_array_equal(tensor, stored[name], err_msg=name)
    assert {name for transform in transforms.values() for name in transform.names} == stored.keys()


def tensors_of(family, folder):
    return {
        name: x.read() for name, x in FORMATS[family](folder, read_tensors(folder), Options()).tensors.items()
    }


@pytest.mark.wide
def test_olmo_hybrid_s_heads_of_values_may_share_keys(tmp_path):
    """As if each had a copy of its keys; and back, to the bit."""
    tokens, found = expected("olmo_hybrid")[1][0], []
    for name, heads in (("copied", None), ("grouped", 4)):
        source, folder = tmp_path / name, tmp_path / f"{name}_run"
        grouped_heads.write_folder(source, has_copies=name == "copied")
        convert("olmo_hybrid", source, folder, Options())
        run = hyena_jax.load_run(folder)
        assert run.experiment.model.pattern[0].n_value_heads == heads
        found.append(logits_of(run.model, run.params, tokens))
    assert np.abs(found[0] - found[1]).max() < MOST
    command = ["export", folder, "--output", tmp_path / "exported", "--format", "transformers"]
    assert cli.main(list(map(str, command))) == 0
    theirs, ours = (tensors_of("olmo_hybrid", tmp_path / name) for name in ("grouped", "exported"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)


@pytest.mark.wide
def test_every_block_of_rwkv_lm_s_demo_has_a_norm_that_the_first_alone_reads(stored, tmp_path, capsys):
    """And v0, v1, v2 of the first block. Nothing is made of them, and they are named."""
    file = stored("rwkv7") / "model.safetensors"
    tensors = load_file(file)
    unused = {f"blocks.0.att.v{i}": tensors[f"blocks.1.att.v{i}"] for i in range(3)}
    parts = [f"blocks.{i}.ln0.{part}" for i in (1, 2) for part in ("weight", "bias")]
    unused |= dict.fromkeys(parts, np.full(12, 7.0, np.float32))
    plain = {name: x for name, x in tensors.items() if name not in unused}
    found = []
    for some in (plain, plain | unused):
        save_file(some, file)
        found.append(rwkv7.read(file, read_tensors(file), Options()))
    assert found[0].model == found[1].model
    used = {name for transform in found[1].table.transforms.values() for name in transform.names}
    assert used == plain.keys()
    assert found[0].note is None
    assert cli.main(["convert", "rwkv7", str(file), "--output", str(tmp_path / "run")]) == 0
    names = "blocks.0.att.v0, blocks.0.att.v1, blocks.0.att.v2, blocks.1.ln0.bias and 3 more"
    assert f"left out, as RWKV-7 never reads them: {names}\n" in capsys.readouterr().out


def test_the_0b1_has_the_shapes_of_its_preset():
    """By the sizes of the released files, of which `configs/rwkv7_190m.py` has the same model."""
    preset = hyena_jax.load_config("rwkv7_190m").model
    low_ranks, ffn = {"w": 64, "a": 64, "v": 32, "g": 128}, "blocks.0.ffn.key.weight"
    shapes = {"emb.weight": (65_536, 768), ffn: (3072, 768), "blocks.11.ln1.bias": (768,)}
    shapes |= {f"blocks.{i}.att.{name}1": (768, rank) for i in (0, 1) for name, rank in low_ranks.items()}
    model = rwkv7.from_shapes(shapes | {"blocks.0.att.r_k": (12, 64)})
    (mixer,) = model.pattern
    assert mixer.ranks(768) == preset.pattern[0].ranks(768)
    same = {name: getattr(preset, name) for name in ("pattern", "max_len", "dtype", "remat")}
    assert dataclasses.replace(model, **same) == preset
    values = {"model_type": "rwkv7", "hidden_size": 768, "num_hidden_layers": 12, "norm_eps": 2e-5}
    (mixer,) = rwkv7.from_settings(Settings("config.json", values)).pattern
    assert mixer.norm_eps == 64 * 2e-5  # of a sum over a head's channels


def test_the_2b_has_its_tensors():
    """By the sizes of the released config, of which `configs/griffin.py` has the same model."""
    values = {"model_type": "recurrent_gemma", "vocab_size": 256_000, "hidden_size": 2560}
    values |= {"intermediate_size": 15360, "num_hidden_layers": 26, "lru_width": 2560}
    values |= {"num_attention_heads": 10, "num_key_value_heads": 1}
    values |= {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    model = recurrentgemma.from_settings(Settings("config.json", values))
    names = {n for t in recurrentgemma.transformers_table(model).transforms.values() for n in t.names}
    assert len(names) == 484
    preset = hyena_jax.load_config("griffin:recurrentgemma_2b").model
    same = {name: getattr(preset, name) for name in ("max_len", "dtype", "remat", "round_embedding_scale")}
    assert dataclasses.replace(model, **same) == preset


@pytest.mark.parametrize(
    ("flags", "window"),
    [pytest.param((), 6, marks=pytest.mark.grid), (("--window-of", "transformers"), 5)],
)
def test_recurrentgemma_s_window_is_that_of_the_code_it_was_trained_with(
    stored, tmp_path, capsys, flags, window
):
    folder = str(stored("recurrentgemma"))
    assert cli.main(["convert", "recurrentgemma", folder, "--output", str(tmp_path / "run"), *flags]) == 0
    said = "a token sees 6 earlier ones, as in DeepMind's code; transformers shows it 5"
    assert (said in capsys.readouterr().out) == (not flags)
    model = hyena_jax.config.read_run(tmp_path / "run").model
    assert {mixer.window for mixer in model.pattern if hasattr(mixer, "window")} == {window}
