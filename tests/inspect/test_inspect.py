"""Traces, filters, memory lengths and figures say what the model computes."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax
from tolerances import assert_close

from hyena_jax import inspect, models
from hyena_jax.config import (
    Experiment,
    ExplicitFilterConfig,
    FIRConfig,
    HawkConfig,
    HyenaConfig,
    ImageClassifierConfig,
    ImagesConfig,
    LanguageModelConfig,
    LoRAConfig,
    ShortFilterConfig,
    TextConfig,
)
from hyena_jax.data import own
from hyena_jax.inspect import content, json_values
from hyena_jax.mixers import Hawk
from hyena_jax.ops import hankel
from hyena_jax.system.errors import UserError
from hyena_jax.training import initial
from hyena_jax.training.folder import RunFolder
from hyena_jax.training.step import init_params

pytestmark = pytest.mark.xdist_group("inspect")  # its tests share a trace

HYENA = HyenaConfig(filter=ExplicitFilterConfig(n_taps=16))
CONFIG = LanguageModelConfig(
    pattern=(HYENA, HawkConfig(width=6, gate_blocks=2)),
    n_layers=2,
    d_model=8,
    d_ff=8,
    max_len=16,
    vocab_size=11,
    remat="block",
)


@pytest.fixture(scope="module")
def seen():
    """A model with a Hyena and a Hawk layer, its parameters and a trace."""
    model = models.build(CONFIG)
    tokens = np.arange(12, dtype=np.int32)[None] % 11
    shapes, rng = jax.eval_shape(lambda: init_params(model, 0)), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: np.float32(0.3 * rng.standard_normal(leaf.shape)), shapes)
    return model, params, tokens, inspect.trace(model, params, tokens)


def test_the_facts_of_a_page_and_the_quartiles_of_effective_lengths():
    rows = [{"step": 1}, *({"validation/loss": loss} for loss in (3.0, 1.0, 2.0))]
    experiment = Experiment(model=CONFIG, data=TextConfig(seq_len=8))
    shown = SimpleNamespace(source="a text")
    facts = dict(content._facts(experiment, rows, {"x": np.zeros((3, 4))}, shown, " (nats)"))
    assert facts["validation loss (nats)"] == "2.0000 at the end, 1.0000 at best"
    assert (facts["parameters"], facts["shown"]) == ("12", "a text")
    layer = {"name": "blocks_0", "count": 2, "width": 8, "length": 64, "quartilesAfter": (3.0, 9.0, 27.0)}
    assert content._lengths(layer) == ["blocks_0", "16", "64", "9 (3 to 27)"]


@pytest.mark.wide
def test_a_trace_is_the_models_own_pass(seen):
    model, params, tokens, trace = seen
    assert_close(trace.outputs, jax.jit(model.apply)({"params": params}, tokens))
    assert [layer.path for layer in trace.layers] == [("blocks_0", "mixer"), ("blocks_1", "mixer")]
    assert all(layer.inputs.shape == (1, 12, 8) for layer in trace.layers)
    embedded = params["embedding"]["embedding"][tokens]
    assert_close(trace.blocks[0].stream, np.sqrt(np.square(embedded).mean(-1)))
    # What the second block's mixer adds is its output for the traced input.
    layer = trace.layers[1]
    y = jax.jit(layer.mixer.apply)({"params": layer.own(params)}, layer.inputs)
    assert_close(trace.blocks[1].mixer, np.sqrt(np.square(y).mean(-1)))
    assert trace.last.shape == (1, 12)


class Letters:
    """a, b, ... are 1, 2, ...; texts begin with 0."""

    vocab_size, bos, stream = 11, 0, None

    def encode(self, text):
        return np.array([ord(letter) - 96 for letter in text], np.int32)

    def decode(self, ids):
        return "".join(chr(96 + i) for i in ids if i > 0)


class Rows(NamedTuple):
    """Held-out data of one row."""

    batch: dict
    source: str = "rows"

    def n_eval_rows(self):
        return 1

    def eval_batches(self, batch_size):
        yield self.batch


def row(inputs, targets, weights):
    return Rows(
        {"inputs": np.array([inputs]), "targets": np.array([targets]), "weights": np.array([weights])}
    )


def test_a_text_begins_as_in_training():
    shown = content.from_text(Letters(), "abc", 3)
    assert shown.inputs.tolist() == [[0, 1, 2]]
    assert shown.labels == ("<bos>", "a", "b")
    assert shown.source.startswith("the first 3 tokens")
    with pytest.raises(UserError, match="text must be at least one token long, got ''"):
        content.from_text(Letters(), "", 3)


def test_the_padding_of_a_texts_last_window_is_not_shown():
    tokens = np.array([3, 1, 4, 1, 5, 9, 2])
    (*_, batch) = own.from_tokens(tokens, 4, held_out=tokens).eval_batches(1)
    assert batch["weights"].tolist() == [[1, 1, 0, 0]]
    shown = content.held_out(Rows(batch), Letters(), 0, 16)
    assert shown.labels == ("e", "i", "b")
    assert shown.shift == 1
    assert content.held_out(Rows(batch), Letters(), 0, 1).shift == 1
    logits = np.random.default_rng(0).standard_normal((1, 3, 11))
    found = content.scores(shown, logits)
    wanted = [-np.log(softmax(logits, axis=-1)[0, t, token]) for t, token in ((0, 9), (1, 2))]
    assert_close(found.nats[1:], wanted, "float32")


def test_answers_stand_where_they_are_given():
    last = content.held_out(row([1, 2, 3], [0, 0, 3], [0.0, 0, 1]), Letters(), 0, 16)
    assert (last.shift, last.inputs.shape) == (0, (1, 3))
    one_class = Rows({"inputs": np.array([[1, 2, 3]]), "targets": np.array([1]), "weights": np.array([1.0])})
    with pytest.raises(UserError, match="the shape of a row's targets must be one a token"):
        content.held_out(one_class, Letters(), 0, 16)
    masked = content.held_out(row([1, 2, 3, 4], [7, 3, 4, 5], [0.0, 1, 1, 1]), Letters(), 0, 16)
    assert (masked.shift, masked.inputs.shape) == (1, (1, 4))


def test_of_a_row_of_documents_the_longest_is_shown():
    rows = row([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], [1.0] * 5)
    rows.batch["segment_ids"] = np.array([[0, 0, 1, 1, 1]])
    shown = content.held_out(rows, Letters(), 0, 16)
    assert shown.inputs.tolist() == [[3, 4, 5]]
    assert shown.targets.tolist() == [[4, 5, 6]]
    assert shown.source.startswith("3 tokens, the longest document of held-out row 0")


def run_of(workdir, model, encoding=None):
    data = ImagesConfig() if model.input_kind.is_images else TextConfig(seq_len=16)
    experiment = Experiment(model=model, data=data)
    return RunFolder(experiment, encoding or Letters(), "", workdir / "checkpoints", {})


@pytest.mark.wide
def test_what_was_before_training(tmp_path):
    """The seed's parameters, the base of LoRA, or step 0; nothing for a run that was not trained."""
    model = models.build(CONFIG)
    base = init_params(model, 5)
    folder = run_of(tmp_path, CONFIG)
    words, drawn = content._start(folder, model, 3, print)
    assert words == "drawn from the run's seed"
    chex.assert_trees_all_equal(drawn, init_params(model, 0))
    assert content._start(folder, model, 0, print) == ("", None)
    initial.write_base(tmp_path, base, initial.digest(base), "elsewhere")
    adapted = run_of(tmp_path, dataclasses.replace(CONFIG, lora=LoRAConfig(rank=1)))
    words, found = content._start(adapted, model, 3, print)
    assert words == "from the parameters that the run was given"
    chex.assert_trees_all_equal(found, base)


def test_a_run_that_was_converted_and_trained_on_started_at_step_0(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "saved_steps", lambda folder: [0, 3])
    monkeypatch.setattr(content, "load_params", lambda *arguments: (0, arguments[2]))
    model = models.build(CONFIG)
    assert content._start(run_of(tmp_path, CONFIG), model, 3, print) == ("at step 0", "0")


def beside(other, params, shown, seen, monkeypatch, path):
    monkeypatch.setattr(content, "read_folder", lambda workdir: run_of(workdir, other, "equal"))
    monkeypatch.setattr(content, "load_params", lambda _, model, *__: (1, params or init_params(model, 0)))
    return content._beside(path, "equal", shown, seen, print)


def test_a_run_beside_reads_the_same_tokens(seen, tmp_path, monkeypatch):
    _, params, tokens, trace = seen
    shown = content.Example(tokens, tuple("a" * 12), tokens, np.ones(tokens.shape), 1, "")
    assert beside(CONFIG, params, shown, trace, monkeypatch, tmp_path).seen.outputs.shape == (1, 12, 11)
    fewer = dataclasses.replace(CONFIG, vocab_size=10)
    with pytest.raises(UserError, match="beside must be a run with a vocab_size above the shown id 10, got"):
        beside(fewer, params, shown, trace, monkeypatch, tmp_path)


@pytest.mark.grid
def test_a_run_beside_reads_as_many_patches(tmp_path, monkeypatch):
    common = {"pattern": (FIRConfig(),), "n_layers": 1, "d_model": 4, "d_ff": 4, "dtype": "float32"}
    sizes = {"image_size": (8, 8), "channels": 1, "n_classes": 2}
    config = ImageClassifierConfig(**common, **sizes, patch_size=(2, 2))
    model, image = models.build(config), np.zeros((1, 8, 8, 1), np.float32)
    shown = content.Example(image, (), np.zeros(1, np.int32), np.ones(1), 0, "")
    seen = inspect.trace(model, init_params(model, 0), image)
    coarse = dataclasses.replace(config, patch_size=(4, 4))
    with pytest.raises(UserError, match="beside must be a run whose mixers read 16 positions, as this run's"):
        beside(coarse, None, shown, seen, monkeypatch, tmp_path)
    larger = dataclasses.replace(config, image_size=(16, 8))
    with pytest.raises(UserError, match=r"beside must be a run on images of the shape \(8, 8, 1\), got"):
        beside(larger, None, shown, seen, monkeypatch, tmp_path)


def test_filters_are_what_the_mixer_convolves_with(seen):
    _, params, _, trace = seen
    hyena, hawk = trace.layers
    h = inspect.filters(hyena.mixer, hyena.own(params), 16)
    assert h.shape == (1, 8, 16)
    assert_close(h[0], np.asarray(hyena.own(params)["filter"]["taps"])[0])
    assert inspect.filters(hawk.mixer, hawk.own(params), 16) is None


def test_a_filter_of_few_taps_ends_with_them(seen):
    mixer = seen[3].layers[0].mixer.clone(config=HyenaConfig(filter=ShortFilterConfig(n_taps=3)))
    params = jax.eval_shape(mixer.init, jax.random.key(0), jnp.zeros((1, 4, 8)))["params"]
    params = jax.tree.map(lambda p: np.ones(p.shape, p.dtype), params)
    assert inspect.filters(mixer, params, 16).tolist() == np.ones((1, 8, 3)).tolist()


def test_effective_lengths_and_spectra():
    h = np.array([[1.0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [1e-200, 1e-200, 1e-200, 1e-200]])
    assert inspect.effective_length(h).tolist() == [1, 3, 0, 4]
    assert inspect.effective_length(h, 0.5).tolist() == [1, 3, 0, 2]
    with pytest.raises(ValueError, match="energy must be in"):
        inspect.effective_length(h, 0)
    assert_close(inspect.spectrum(h[:2]), np.ones((2, 5)))


def test_hankel_values_are_those_of_distillation():
    h = np.random.default_rng(0).standard_normal((2, 3, 12))
    values = inspect.hankel_values(h)
    assert values.shape == (2, 3, 5)
    assert_close(values[1, 2], np.linalg.svd(hankel.dense(h[1, 2, None, 1:], 5)[0], compute_uv=False))
    geometric = 0.5 ** np.arange(12)[None]
    assert inspect.hankel_values(geometric, 2)[0, 1] < 1e-12
    assert inspect.hankel_values(np.ones((3, 2))).shape == (3, 0)


def test_gates_and_memory_lengths(seen):
    _, params, _, trace = seen
    hyena, hawk = trace.layers
    own = hawk.own(params)
    gates = inspect.gates(hawk.mixer, own, hawk.inputs)
    assert gates.decay.shape == (1, 12, 6)
    assert_close(gates.decay, np.exp(-8 * gates.recurrence * jax.nn.softplus(own["rate"])))
    assert isinstance(hawk.mixer, Hawk)
    assert inspect.gates(hyena.mixer, hyena.own(params), hyena.inputs) is None
    decay = jnp.asarray([[[0.5, 1.0, 0.0], [0.5, 1.0, 0.9]]])
    assert_close(inspect.memory_lengths(decay)[0, :2], [1 / np.log(2), 1e6])
    assert inspect.memory_lengths(decay)[0, 2] == 0


def test_figures_can_be_drawn(tmp_path):
    rng = np.random.default_rng(0)
    signed, h = rng.standard_normal((5, 5)), rng.standard_normal((2, 3, 8))
    figures = [
        inspect.draw_mixing({"own": signed, "attention": np.abs(signed)}, list("a$b\n ")),
        inspect.draw_filters(h, 2 * h, (0, 2), 1),
        inspect.draw_hankel(inspect.hankel_values(h), inspect.hankel_values(2 * h)),
        inspect.draw_gates({"a": rng.random((5, 4))}, np.arange(1.0, 5)),
        inspect.draw_losses(np.array([np.nan, 1, 2]), list("abc")),
        inspect.draw_activations(np.ones(3), np.ones(2), np.ones(2)),
        inspect.draw_patches(rng.random((4, 6, 1)), rng.standard_normal(6), (2, 3), 4),
    ]
    images = [image for axes in figures[0].axes for image in axes.images]
    assert [image.get_clim() for image in images] == [(-1, 1), (0, 1)]
    figures[0].savefig(tmp_path / "mixing.png", dpi=40)  # which reads the labels
    with pytest.raises(ValueError, match="weights must be rows"):
        inspect.draw_patches(np.zeros((4, 4, 1)), np.zeros(3), (2, 2), 0)


def test_the_matrices_of_a_causal_mixer_read_earlier_tokens_alone(seen):
    _, params, _, trace = seen
    shown = json_values.mixed(trace.layers[0], trace.layers[0].own(params), n_heads=2)
    assert shown.is_causal
    assert shown.views[0].name == "all 8 channels: root mean square"
    for view in shown.views:
        assert_close(np.triu(view.matrix, 1), np.zeros((12, 12)))
        assert np.abs(np.tril(view.matrix, -1)).max() > 0


class Running(nn.Module):
    """A mixer without mixing matrices, under a registered config."""

    config: FIRConfig = FIRConfig()

    @nn.compact
    def __call__(self, x):
        return jnp.cumsum(jnp.tanh(x), axis=1)


def test_a_mixer_without_a_matrix_is_shown_by_its_jacobian():
    x = jnp.ones((1, 5, 2))
    shown = json_values.mixed(inspect.Layer(("mixer",), Running(), x), {}, n_heads=8)
    assert shown.title == "fir: norms of its Jacobian's blocks, exact"
    (view,) = shown.views
    assert_close(view.matrix, np.tri(5) * 2**0.5 / np.cosh(1) ** 2)


@pytest.mark.wide
def test_another_run_s_matrices_are_those_as_deep_in_its_model(seen):
    _, params, _, trace = seen  # hyena, then hawk
    shallow = trace._replace(layers=trace.layers[1:])
    for ours, theirs, mixers in ((trace, shallow, ["hawk", "hawk"]), (shallow, trace, ["hyena"])):
        other = json_values.Other("run b", Path(), theirs, params)
        mixing = json_values.matrices(ours, params, other, lambda: None)
        titles = [f"run b, layer 1, {mixer}: mixing matrix" for mixer in mixers]
        assert [values["besideTitle"] for values, _ in mixing] == titles


def test_curves_leave_out_what_was_not_measured():
    rows = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": None, "validation/loss": 1.5}]
    its = [{"step": 3, "train/loss": 0.5}]
    chart = json_values.curves({"": rows, ", run b": its}, "loss", "loss, nats")
    assert [(s["name"], s["x"], s["y"]) for s in chart["series"]] == [
        ("training, single batches", (1,), [2.0]),
        ("validation", (2,), [1.5]),
        ("training, single batches, run b", (3,), [0.5]),
    ]
    assert json_values.curves({"": rows}, "accuracy", "accuracy") is None
