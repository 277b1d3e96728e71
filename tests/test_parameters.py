"""The table of parameters: docstrings against parameter trees, and the file against the docstrings."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import parameter_table
import pytest
from cases import CASES, OPTIONS
from cases.case import D
from parameter_table import entries

from hyena_jax import config, mixers, models
from hyena_jax.config import ImageClassifierConfig, LanguageModelConfig
from hyena_jax.filters import FILTERS, build_filter
from hyena_jax.models.blocks import Block

MAX_LEN = 41
# name: configs that together have every parameter, and the values of the letters in shapes
FILTER_CASES = {
    "implicit": (config.ImplicitFilterConfig(emb_dim=5, width=7, train_decay=True), {"E": 5, "width": 7}),
    "siren": (config.SirenFilterConfig(width=7), {"width": 7}),
    "windowed": (config.WindowedFilterConfig(), {}),
    "explicit": (config.ExplicitFilterConfig(n_taps=11), {"M": 11}),
    "short": (config.ShortFilterConfig(n_taps=11), {"M": 11}),
    "ckconv": (config.CKConvFilterConfig(emb_dim=5, width=7), {"E": 5, "width": 7}),
    "fno": (config.FNOFilterConfig(n_modes=9), {"M": 9}),
    "transfer_function": (config.TransferFunctionFilterConfig(n_state=4), {"n_state": 4}),
    "s4d": (config.S4DFilterConfig(n_state=6), {"n_state": 6}),
    "modal": (config.ModalFilterConfig(n_modes=5), {"n_modes": 5}),
    "real_modal": (config.RealModalFilterConfig(n_modes=5), {"n_modes": 5}),
    "lookup": (config.LookupFilterConfig(width=7), {"width": 7}),
    "stu": (config.STUFilterConfig(n_vectors=4), {"K": 4}),
}


def shapes_of(module, *args) -> dict[str, tuple[int, ...]]:
    tree = jax.eval_shape(lambda: module.init(jax.random.key(0), *args))["params"]
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}


def undocumented(module: type, shapes: Mapping[str, tuple[int, ...]], letters: dict[str, int]) -> list[str]:
    """Entries that are wrong in, or missing from, the docstring of `module`."""
    documented = {entry.path: entry for entry in entries(module)}
    parts = tuple(path.removesuffix("*") for path in documented if path.endswith("/*"))
    wrong = []
    for path, shape in shapes.items():
        if path in documented:
            expected = eval(f"({documented[path].shape},)", {"__builtins__": {}}, letters)
            if shape != expected:
                wrong.append(f"{path} is {shape}, documented {documented[path].shape} = {expected}")
        elif not path.startswith(parts):
            wrong.append(f"{path} is not documented")
    return wrong


@pytest.mark.grid
@pytest.mark.parametrize("name", mixers.MIXERS)
def test_mixers_document_their_parameters(name):
    module = mixers.MIXERS[name]
    seen = set()
    for case in (CASES | OPTIONS).values():
        if mixers.mixer_class(case.config) is module:
            instance = (case.module or module)(D, case.max_len, case.config)
            shapes = shapes_of(instance, jnp.zeros((1, 3, D)))
            seen |= set(shapes)
            assert undocumented(module, shapes, {"D": D, "Lmax": case.max_len, **case.letters}) == []
    unseen = [
        entry.path
        for entry in entries(module)
        if not any(path == entry.path or path.startswith(entry.path.removesuffix("*")) for path in seen)
    ]
    assert unseen == []


@pytest.mark.parametrize("name", FILTERS)
def test_filters_document_their_parameters(name):
    options, letters = FILTER_CASES[name]
    shapes = shapes_of(build_filter(2, 3, MAX_LEN, options), MAX_LEN)
    assert undocumented(FILTERS[name], shapes, {"N": 2, "D": 3, "Lmax": MAX_LEN, **letters}) == []
    assert {entry.path for entry in entries(FILTERS[name])} == set(shapes)


MODEL = LanguageModelConfig(n_layers=1, d_model=4, d_ff=6, max_len=7, vocab_size=11, learned_positions=True)
IMAGES = ImageClassifierConfig(
    n_layers=1, d_model=4, d_ff=6, image_size=(9, 8), channels=2, n_classes=5, patch_size=(3, 2)
)


@pytest.mark.parametrize(
    ("model", "inputs", "letters"),
    [
        (
            dataclasses.replace(MODEL, tied_head=False, head_bias=True, embedding_norm="layer"),
            jnp.zeros((1, 3), jnp.int32),
            {"P": 11, "Lmax": 7},
        ),
        (
            IMAGES,
            jnp.zeros((1, 9, 8, 2)),
            {"patch_height": 3, "patch_width": 2, "colours": 2, "n_classes": 5, "Lmax": 12},
        ),
    ],
)
def test_models_document_their_parameters(model, inputs, letters):
    module = models.build(model)
    shapes = shapes_of(module, inputs)
    assert undocumented(type(module), shapes, {"D": 4, **letters}) == []
    named = {entry.path for entry in entries(type(module)) if not entry.path.endswith("/*")}
    assert named <= set(shapes)


def test_blocks_document_their_parameters():
    seen = set()
    for ffn in ("gelu_tanh", "geglu"):
        model = dataclasses.replace(MODEL, ffn=ffn, ffn_shift=True)
        shapes = shapes_of(Block(model.pattern[0], model), jnp.zeros((1, 3, 4)))
        assert undocumented(Block, shapes, {"D": 4, "d_ff": 6}) == []
        seen |= set(shapes)
    assert {entry.path for entry in entries(Block) if not entry.path.endswith("/*")} <= seen


def test_the_file_is_what_the_docstrings_give():
    written = parameter_table.FILE.read_text(encoding="utf-8")
    assert written == parameter_table.render(), "run: python tests/programs/parameter_table.py"
