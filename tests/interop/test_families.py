"""Tiny models of the public references, stored with their logits: see `make_references.py`."""

import dataclasses

import grouped_heads
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import unflatten_dict
from grid import grid_but, in_grid
from references import STORED, expected, logits_of, logits_of_source, params_of, source_of
from safetensors.numpy import load_file, save_file

import hyena_jax
from hyena_jax import cli
from hyena_jax.interop import recurrentgemma, rwkv7
from hyena_jax.interop.convert import FORMATS, convert
from hyena_jax.interop.family import Options, Settings
from hyena_jax.system.errors import UserError
from hyena_jax.system.trees import named_leaves
from hyena_jax.training.checkpoint import Checkpoints
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import init_state

MOST = 1e-4
"""Largest difference of logits in float32; the largest logits are between 2 and 13."""
BOTH_LENGTHS = pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.grid), 1])


def assert_are_those(found, logits):
    assert found.shape[-1] == logits.shape[-1]  # no padding of the vocabulary
    assert np.abs(found[:, -logits.shape[1] :] - logits).max() < MOST


@BOTH_LENGTHS
@pytest.mark.parametrize(
    "family",
    ["olmo_hybrid", "stripedhyena2", "rwkv7", *in_grid("safari", "hyenadna", "rwkv7_transformers")],
)
def test_logits_are_the_reference_s(family, which):
    tokens, logits = expected(family)[which]
    assert_are_those(logits_of_source(source_of(family), tokens), logits)


@BOTH_LENGTHS
def test_logits_of_a_converted_run_are_the_reference_s(converted, which):
    run = hyena_jax.load_run(converted("lfm2"))
    tokens, logits = expected("lfm2")[which]
    assert_are_those(logits_of(run.model, run.params, tokens), logits)
    with pytest.raises(UserError, match="path must be the text to measure on, as the run was converted"):
        run.evaluate()


@pytest.mark.grid
@pytest.mark.parametrize("family", grid_but([*FORMATS, "rwkv7_transformers"]))
def test_every_family_is_converted(converted, family):
    """What is written is what the tests above compute with."""
    run, source = hyena_jax.load_run(converted(family)), source_of(family)
    assert run.experiment.model == source.model
    jax.tree.map(np.testing.assert_array_equal, run.params, params_of(source))


def windows_of(model):
    return {mixer.window for mixer in model.pattern if hasattr(mixer, "window")}


def test_recurrentgemma_has_three_windows_for_one_number():
    """transformers shows a token `attention_window_size` - 1 earlier ones, DeepMind's code, by which the
    weights were trained, `attention_window_size`."""
    source, narrow = source_of("recurrentgemma"), source_of("recurrentgemma", window_of="transformers")
    assert windows_of(source.model) == {6}
    assert "a token sees 6 earlier ones, as in DeepMind's code; transformers shows it 5" in source.note
    assert windows_of(narrow.model) == {5}
    assert narrow.note is None


@pytest.mark.grid
def test_recurrentgemma_s_logits_of_either_window():
    tokens, logits = expected("recurrentgemma")[1]
    assert_are_those(logits_of_source(source_of("recurrentgemma", window_of="transformers"), tokens), logits)
    found = logits_of_source(source_of("recurrentgemma"), tokens)
    differences = np.abs(found - logits).max(axis=(0, 2))
    assert differences[:6].max() < MOST
    assert differences[6:].max() > 0.01


@BOTH_LENGTHS
def test_recurrentgemma_of_deepmind_s_flax_code(tmp_path, which):
    with np.load(STORED / "recurrentgemma_flax" / "params.npz") as file:
        tree = unflatten_dict(dict(file), sep="/")
    ocp.PyTreeCheckpointer().save(tmp_path / "2b", {"params": tree})  # block keys are literally `blocks.0`
    source = source_of("recurrentgemma", tmp_path / "2b", max_len=32)
    assert source.model.max_len == 32
    tokens, logits = expected("recurrentgemma_flax")[which]
    assert_are_those(logits_of_source(source, tokens), logits)


@pytest.mark.parametrize("family", [*FORMATS, "rwkv7_transformers"])
def test_every_tensor_is_used_and_read_back(family):
    """What the table writes is what it read; poles and factors of norms are computed and may be rounded."""
    source = source_of(family)
    leaves, used = named_leaves(params_of(source)), {*source.table.copies, *source.table.constants}
    for path, transform in source.table.transforms.items():
        used |= {*transform.names}
        for name, tensor in zip(transform.names, transform.write(leaves[path]), strict=True):
            theirs = source.tensors[name].read()
            np.testing.assert_allclose(tensor, theirs, rtol=2e-6, atol=1e-7, err_msg=name)
    assert all(source.table.ignored.fullmatch(name) for name in source.tensors.keys() - used)


@pytest.mark.grid
def test_the_optimizer_s_state_is_that_of_a_new_run(converted):
    folder = converted("lfm2")
    run = hyena_jax.load_run(folder)
    optimizer = make_optimizer(run.experiment.optimizer, run.params, run.experiment.training.steps)
    state = jax.device_get(init_state(run.params, optimizer))
    with Checkpoints(folder / "checkpoints", 1, print) as checkpoints:
        restored = checkpoints.restore(state.to_items())
    jax.tree.map(np.testing.assert_array_equal, restored.items, state.to_items())
    assert restored.meta.to_json() == {"step": 0, "loss": None}


@pytest.mark.wide
def test_olmo_hybrid_s_heads_of_values_may_share_keys(tmp_path):
    """As if each had a copy of its keys; and back, to the bit."""
    tokens, found = expected("olmo_hybrid")[1][0], []
    for name, heads in (("copied", None), ("grouped", 4)):
        grouped_heads.write_folder(tmp_path / name, has_copies=name == "copied")
        source = source_of("olmo_hybrid", tmp_path / name)
        assert source.model.pattern[0].n_value_heads == heads
        found.append(logits_of_source(source, tokens))
    assert np.abs(found[0] - found[1]).max() < MOST
    run, exported = tmp_path / "run", tmp_path / "exported"
    convert("olmo_hybrid", tmp_path / "grouped", run, Options())
    assert cli.main(["export", str(run), "--output", str(exported), "--format", "transformers"]) == 0
    again = source_of("olmo_hybrid", exported).tensors
    assert again.keys() == source.tensors.keys()
    for name, tensor in source.tensors.items():
        np.testing.assert_array_equal(again[name].read(), tensor.read(), err_msg=name)


@pytest.mark.wide
def test_every_block_of_rwkv_lm_s_demo_has_a_norm_that_the_first_alone_reads(stored, tmp_path, capsys):
    """And v0, v1, v2 of the first block. Nothing is made of them, and they are named."""
    folder = stored("rwkv7")
    tensors = load_file(folder / "model.safetensors")
    unused = {f"blocks.0.att.v{i}": tensors[f"blocks.1.att.v{i}"] for i in range(3)}
    parts = [f"blocks.{i}.ln0.{part}" for i in (1, 2) for part in ("weight", "bias")]
    unused |= dict.fromkeys(parts, np.full(12, 7.0, np.float32))
    plain = {name: x for name, x in tensors.items() if name not in unused}
    found = []
    for some in (plain, plain | unused):
        save_file(some, folder / "model.safetensors")
        found.append(source_of("rwkv7", folder))
    assert found[0].model == found[1].model
    assert found[0].note is None
    used = {name for transform in found[1].table.transforms.values() for name in transform.names}
    assert used == plain.keys()
    assert cli.main(["convert", "rwkv7", str(folder), "--output", str(tmp_path / "run")]) == 0
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
    values |= {"decay_low_rank_dim": 3, "a_low_rank_dim": 5, "v_low_rank_dim": 2, "gate_low_rank_dim": 6}
    (mixer,) = rwkv7.from_settings(Settings("config.json", values)).pattern
    assert mixer.norm_eps == 64 * 2e-5  # of a sum over a head's channels
    assert mixer.ranks(768) == (3, 5, 2, 6)


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
