import json
import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyena_jax import models
from hyena_jax.config import AttentionConfig, HawkConfig, HyenaConfig, LanguageModelConfig, UserError
from hyena_jax.generation import saved_state
from hyena_jax.generation.decoding import Request, continuations, prefill, proceed

pytestmark = pytest.mark.xdist_group("saved_state")  # its tests share a model


@pytest.fixture(scope="module")
def model():
    config = LanguageModelConfig(
        pattern=(HyenaConfig(), HawkConfig()), n_layers=2, d_model=8, d_ff=8, max_len=90, vocab_size=11
    )
    module = models.build(config)
    return module, jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["params"]


@pytest.fixture
def saved(model, tmp_path):
    module, params = model
    prompted = prefill(module, params, [np.array([3, 1, 4]), np.array([1])])
    origin = saved_state.origin(module.config, params)
    saved_state.save(tmp_path / "state", prompted, origin)
    return prompted, tmp_path / "state", origin


def test_a_saved_state_goes_on_as_if_it_had_not_been_saved(model, saved):
    prompted, path, origin = saved
    loaded = saved_state.load(path, *model, origin)
    assert loaded.room == prompted.room == 87
    request = Request(100, seed=2, n_samples=2)  # slides too
    for ours, expected in zip(
        continuations(proceed(*model, loaded, request)),
        continuations(proceed(*model, prompted, request)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours.tokens, expected.tokens)
    assert [*map(list, loaded.read)] == [[3, 1, 4], [1]]


def test_a_state_of_other_parameters_is_refused(model, saved):
    module, params = model
    other = jax.tree.map(lambda x: x + 1, params)
    with pytest.raises(UserError, match="belongs to another model or checkpoint"):
        saved_state.load(saved[1], module, other, saved_state.origin(module.config, other))


@pytest.mark.parametrize("content", [b"", b"{}", None])
def test_what_is_no_saved_state_is_refused(model, saved, tmp_path, content):
    path = tmp_path / "wrong"
    path.write_bytes(saved[1].read_bytes()[:2000] if content is None else content)
    with pytest.raises(UserError, match="cannot be read"):
        saved_state.load(path, *model, saved[2])
    with pytest.raises(UserError, match="cannot be read"):
        saved_state.load(tmp_path / "missing", *model, saved[2])


def arrays_of(path):
    with np.load(path) as file:
        return dict(file)


def about(arrays, **changes):
    return arrays | {"about": np.array(json.dumps(json.loads(str(arrays["about"])) | changes))}


def with_first(arrays, change):
    name = next(name for name, array in arrays.items() if name.startswith("leaf") and array.ndim > 1)
    return arrays | {name: change(arrays[name])}


def last(arrays):
    """The name of the logits."""
    return max((name for name in arrays if name.startswith("leaf")), key=lambda name: int(name[5:]))


CHANGES = {
    "a context of 0": (lambda a: about(a, context=0), "context must be in 3..90, got 0"),
    "a long context": (lambda a: about(a, context=10**12), "context must be in 3..90"),
    "no context": (lambda a: about(a, context=None), "context must be in 3..90, got None"),
    "a context of another type": (lambda a: about(a, context=True), "context must be in 3..90, got True"),
    "no rows": (lambda a: about(a, rows=0), "rows must be as many as"),
    "many rows": (lambda a: about(a, rows=10**12), "rows must be as many as"),
    "rows of another type": (lambda a: about(a, rows=[2]), "rows must be as many as"),
    "another format": (lambda a: about(a, format=2), "belongs to another model or checkpoint"),
    "about nothing": (lambda a: a | {"about": np.array("[]")}, "about must be an object"),
    "deep": (lambda a: a | {"about": np.array("[" * 9000)}, "lists and objects deep"),
    "a number as about": (lambda a: a | {"about": np.array(3)}, "about must be a short text"),
    "without about": (lambda a: {k: v for k, v in a.items() if k != "about"}, "one with `about`"),
    "without logits": (lambda a: {k: v for k, v in a.items() if k != last(a)}, "must be as in the model"),
    "another array": (lambda a: a | {"x": np.zeros(2)}, "arrays must be as in the model's state"),
    "logits of another shape": (lambda a: a | {last(a): np.zeros((2, 12), np.float32)}, r"\(2, 11\), got"),
    "logits of another dtype": (lambda a: a | {last(a): np.zeros((2, 11))}, "must be float32"),
    "NaN": (lambda a: a | {last(a): np.full((2, 11), np.nan, np.float32)}, "a number everywhere"),
    "another shape": (lambda a: with_first(a, lambda x: x[..., :1]), "must be float32"),
    "another dtype": (lambda a: with_first(a, lambda x: x.astype(np.float64)), "must be float32"),
    "an array of texts": (lambda a: with_first(a, lambda x: x.astype("U9")), "must be float32"),
    "tokens that are none": (
        lambda a: a | {"read_0": np.array([3, 99, 4], np.int32)},
        "prompt token must be",
    ),
    "tokens of another dtype": (lambda a: a | {"read_0": np.array([3.0, 1, 4])}, "read_0 must be int32"),
    "an empty prompt": (lambda a: a | {"read_1": np.zeros(0, np.int32)}, "at least one token"),
    "more tokens than context": (
        lambda a: a | {"read_1": np.zeros(91, np.int32)},
        "context must be in 91..90",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_a_state_that_is_not_the_models_is_refused(model, saved, tmp_path, change, message):
    path = tmp_path / "changed.npz"
    np.savez(path, **change(arrays_of(saved[1])))
    with pytest.raises(UserError, match=message):
        saved_state.load(path, *model, saved[2])


def test_archives_that_are_not_plain_are_refused(model, saved, tmp_path):
    arrays, path = arrays_of(saved[1]), tmp_path / "bomb.npz"
    np.savez_compressed(path, **arrays | {"leaf_0": np.zeros((3000, 3000))})
    with pytest.raises(UserError, match="neither compressed nor encrypted"):
        saved_state.load(path, *model, saved[2])
    data = bytearray(saved[1].read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # the encryption flag in the directory
    path.write_bytes(data)
    with pytest.raises(UserError, match="neither compressed nor encrypted"):
        saved_state.load(path, *model, saved[2])
    data = bytearray(saved[1].read_bytes())
    data[data.index(b"descr") + 200] ^= 1  # in the first array, after its header
    path.write_bytes(data)
    with pytest.raises(UserError, match="Bad CRC"):
        saved_state.load(path, *model, saved[2])
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="a file, not a pipe"):
        saved_state.load(path, *model, saved[2])


def test_a_state_in_bfloat16_is_read_as_such(tmp_path):
    """NumPy's format has no bfloat16."""
    config = LanguageModelConfig(
        pattern=(AttentionConfig(),),
        n_layers=1,
        d_model=8,
        d_ff=8,
        max_len=16,
        vocab_size=11,
        dtype="bfloat16",
    )
    module = models.build(config)
    params = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["params"]
    prompted, origin = prefill(module, params, [np.array([3, 1, 4])]), saved_state.origin(config, params)
    saved_state.save(tmp_path / "state", prompted, origin)
    loaded = saved_state.load(tmp_path / "state", module, params, origin)
    assert "bfloat16" in {leaf.dtype.name for leaf in jax.tree.leaves(prompted.state)}
    chex.assert_trees_all_equal(loaded.state, prompted.state)
    chex.assert_trees_all_equal_dtypes(loaded.state, prompted.state)
