import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyena_jax import models
from hyena_jax.config import HawkConfig, HyenaConfig, LanguageModelConfig, UserError
from hyena_jax.generation import saved_state
from hyena_jax.generation.decoding import Request, continuations, prefill, proceed


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
    with pytest.raises(UserError, match="of another model or checkpoint"):
        saved_state.load(saved[1], module, other, saved_state.origin(module.config, other))


@pytest.mark.parametrize("content", [b"", b"{}", None])
def test_what_is_no_saved_state_is_refused(model, saved, tmp_path, content):
    path = tmp_path / "wrong"
    path.write_bytes(saved[1].read_bytes()[:2000] if content is None else content)
    with pytest.raises(UserError, match="cannot be read"):
        saved_state.load(path, *model, saved[2])
    with pytest.raises(UserError, match="cannot be read"):
        saved_state.load(tmp_path / "missing", *model, saved[2])
