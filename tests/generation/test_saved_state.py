import json
import os

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hyena_jax import models
from hyena_jax.config import AttentionConfig, HawkConfig, HyenaConfig, LanguageModelConfig, ModalFilterConfig
from hyena_jax.generation import saved_state
from hyena_jax.generation.decoding import Request, continuations, prefill, proceed
from hyena_jax.ops.online_conv import TILE
from hyena_jax.system.errors import UserError
from hyena_jax.system.trees import named_leaves

pytestmark = pytest.mark.xdist_group("saved_state")  # its tests share a model


def built(*pattern, **options):
    sizes = {"n_layers": len(pattern), "d_model": 8, "d_ff": 8, "max_len": 90, "vocab_size": 11}
    module = models.build(LanguageModelConfig(pattern=pattern, **sizes, **options))
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["params"]
    rng = np.random.default_rng(0)
    return module, jax.tree.map(lambda leaf: np.float32(0.3 * rng.standard_normal(leaf.shape)), shapes)


def written(path, module, params):
    """A state that was saved, its file, and its origin."""
    prompted = prefill(module, params, [np.array([3, 1, 4]), np.array([1])])
    origin = saved_state.origin(module.config, params)
    saved_state.save_state(path, prompted, origin)
    return prompted, path, origin


@pytest.fixture(scope="module")
def model():
    return built(HyenaConfig(), HawkConfig())


@pytest.fixture
def saved(model, tmp_path):
    return written(tmp_path / "state", *model)


def assert_equal_states(ours, expected):
    chex.assert_trees_all_equal(ours, expected)
    chex.assert_trees_all_equal_dtypes(ours.state, expected.state)


def test_a_saved_state_is_as_it_was(model, saved):
    prompted, path, origin = saved
    loaded = saved_state.load_state(path, *model, origin)
    assert loaded.room == prompted.room == 87
    assert_equal_states(loaded, prompted)


def test_a_state_of_other_parameters_is_refused(model, saved):
    module, params = model
    other = jax.tree.map(lambda x: x + 1, params)
    with pytest.raises(UserError, match="belongs to another model or checkpoint"):
        saved_state.load_state(saved[1], module, other, saved_state.origin(module.config, other))


@pytest.mark.parametrize("content", [b"", b"{}", 7, 2000, -1])
def test_what_is_no_saved_state_is_refused(model, saved, tmp_path, content):
    path = tmp_path / "wrong"
    path.write_bytes(saved[1].read_bytes()[:content] if isinstance(content, int) else content)
    with pytest.raises(UserError, match="cannot be read"):
        saved_state.load_state(path, *model, saved[2])
    with pytest.raises(UserError, match="cannot be read"):
        saved_state.load_state(tmp_path / "missing", *model, saved[2])


def contents(path):
    """The description in a file, and its arrays by name."""
    with safe_open(path, "numpy") as file:
        about = json.loads(file.metadata()["saved_state"])
        return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write(path, about, arrays):
    """A file whose SHA-256 is right."""
    about = {name: value for name, value in about.items() if name != "sha256"}
    about["sha256"] = saved_state._digest(about, arrays)
    save_file(arrays, path, {"saved_state": json.dumps(about)})


def test_arrays_have_the_names_of_leaves(saved):
    about, arrays = contents(saved[1])
    assert about.items() >= {"format": 2, "origin": saved[2], "rows": 2, "context": 90}.items()
    leaves = named_leaves(saved[0]._replace(room=None))
    assert {"logits", "read/0", "read/1", "state/shared/position"} < leaves.keys()
    chex.assert_trees_all_equal(arrays, jax.device_get(leaves))


def test_equal_states_have_equal_files(saved, tmp_path):
    prompted, path, origin = saved
    before = path.read_bytes()
    # Transposed twice: the memory lies otherwise.
    turned = jax.tree.map(lambda x: np.asfortranarray(x) if np.ndim(x) else x, prompted)
    for i, state in enumerate((prompted, prompted, turned)):
        saved_state.save_state(tmp_path / str(i), state, origin)
        assert (tmp_path / str(i)).read_bytes() == before


def test_flipped_bits_are_found(model, saved, tmp_path):
    path, good = tmp_path / "flipped", saved[1].read_bytes()
    n_header = 8 + int.from_bytes(good[:8], "little")
    rng = np.random.default_rng(0)
    in_arrays = rng.integers(n_header, len(good), 40)
    for at in (n_header, *in_arrays, len(good) - 1, *rng.integers(0, n_header, 40)):
        data = bytearray(good)
        data[at] ^= 1 << rng.integers(8)
        path.write_bytes(data)
        where = "the SHA-256 of the contents must be" if at >= n_header else "cannot be read"
        with pytest.raises(UserError, match=where):
            saved_state.load_state(path, *model, saved[2])


def about(**changes):
    return lambda about, arrays: (about | changes, arrays)


def changed(**arrays):
    return lambda about, before: (about, before | {name.replace("_", "/"): x for name, x in arrays.items()})


def without(missing):
    return lambda about, arrays: (about, {name: x for name, x in arrays.items() if name != missing})


def with_first(change):
    """Changes the first array of the state with several axes."""

    def changed(about, arrays):
        name = min(name for name, x in arrays.items() if name.startswith("state") and x.ndim > 1)
        return about, arrays | {name: change(arrays[name])}

    return changed


CHANGES = {
    "a long context": (about(context=10**12), "context must be in 3..90"),
    "no rows": (about(rows=0), "rows must be in 1.."),
    "fewer rows": (about(rows=1), r"logits must be F32 \[1, 11\], got 'F32 \[2, 11\]'"),
    "more rows": (about(rows=3), "cannot be read: .*read/2"),
    "another format": (about(format=3), "format must be 2, got 3"),
    "another fact": (about(other=1), "must be an object with format, origin"),
    "a long fact": (about(origin="0" * 2000), "must be a short text"),
    "deep": (about(rows=json.loads("[" * 200 + "]" * 200)), "lists and objects deep"),
    "without logits": (without("logits"), "cannot be read: .*logits"),
    "without a prompt": (without("read/0"), "cannot be read: .*read/0"),
    "without a part of the state": (without("state/first"), r"state/first must be I32 .*, got 'absent'"),
    "another array": (changed(x=np.zeros(2)), "x must be absent, got 'F64"),
    "NaN": (changed(logits=np.full((2, 11), np.nan, np.float32)), "a number everywhere"),
    "another shape": (with_first(lambda x: x[..., :1].copy()), "must be F32"),
    "a dtype that NumPy lacks": (with_first(lambda x: x.astype(ml_dtypes.float8_e4m3fn)), "got 'F8_E4M3"),
    "tokens that are none": (changed(read_0=np.array([3, 99, 4], np.int32)), "prompt token must be"),
    "an empty prompt": (changed(read_1=np.zeros(0, np.int32)), "at least one token"),
    "more tokens than context": (changed(read_1=np.zeros(91, np.int32)), "context must be in 91..90"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_a_state_that_is_not_the_models_is_refused(model, saved, tmp_path, change, message):
    path = tmp_path / "changed"
    write(path, *change(*contents(saved[1])))
    with pytest.raises(UserError, match=message):
        saved_state.load_state(path, *model, saved[2])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "must be a short text, got ''"),
        ({"step": "3"}, "must be a short text, got ''"),
        ({"saved_state": "3"}, "must be an object with .*, got 3"),
        ({"saved_state": "{"}, "not JSON"),
    ],
)
def test_metadata_of_other_files_are_refused(model, saved, tmp_path, metadata, message):
    save_file(contents(saved[1])[1], tmp_path / "other", metadata)
    with pytest.raises(UserError, match=f"cannot be read as a saved state: .*{message}"):
        saved_state.load_state(tmp_path / "other", *model, saved[2])


def test_the_first_format_and_a_pipe_are_refused(model, saved, tmp_path):
    path = tmp_path / "state.npz"
    np.savez(path, about=json.dumps({"format": 1, "origin": saved[2]}), leaf_0=np.zeros(3))
    with pytest.raises(UserError, match="saved by an earlier version, in format 1; read the prompts again"):
        saved_state.load_state(path, *model, saved[2])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="a file, not a pipe"):
        saved_state.load_state(tmp_path / "pipe", *model, saved[2])


def test_a_full_disk_leaves_the_file_as_it_was(saved, monkeypatch):
    def full(*_):
        raise SafetensorError("No space left on device")

    prompted, path, origin = saved
    before = path.read_bytes()
    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(OSError, match="could not be written: No space left"):
        saved_state.save_state(path, prompted, origin)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("mixer", "options", "name"),
    [
        (AttentionConfig(), {"dtype": "bfloat16"}, "bfloat16"),
        (HyenaConfig(filter=ModalFilterConfig()), {}, "complex64"),
        (HyenaConfig(), {}, "float32"),
    ],
)
def test_a_saved_state_of_any_dtype_goes_on_as_if_it_had_not_been_saved(tmp_path, mixer, options, name):
    model = built(mixer, **options)
    prompted, path, origin = written(tmp_path / "state", *model)
    loaded = saved_state.load_state(path, *model, origin)
    assert name in {leaf.dtype.name for leaf in jax.tree.leaves(prompted.state)}
    assert_equal_states(loaded, prompted)
    request = Request(TILE + 1, seed=2, n_samples=2)
    ours, expected = (continuations(proceed(*model, state, request)) for state in (loaded, prompted))
    chex.assert_trees_all_equal(ours, expected)


def test_dtypes_have_the_names_of_the_library(tmp_path):
    names = (
        "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64"
    )
    arrays = {name: np.ones((2, 3), jnp.dtype(name)) for name in names.split()}
    save_file(arrays, tmp_path / "file")
    with safe_open(tmp_path / "file", "numpy") as file:
        for name, array in arrays.items():
            assert file.get_slice(name).get_dtype() == saved_state._dtype_name(array.dtype)
            np.testing.assert_array_equal(file.get_tensor(name), array, strict=True)
