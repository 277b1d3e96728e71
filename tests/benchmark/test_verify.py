"""Only correct operators are timed."""

import jax.numpy as jnp
import numpy as np
import pytest
from grid import grid_but

from hyena_jax.benchmark import verify
from hyena_jax.config import MIXER_CONFIGS, AttentionConfig, HawkConfig, LanguageModelConfig
from hyena_jax.reference import models as reference


@pytest.mark.wide
@pytest.mark.parametrize("name", grid_but(MIXER_CONFIGS, "hyena", "hawk"))
def test_every_mixer_passes(name):
    assert verify.verify_mixer(name, MIXER_CONFIGS[name](), d_model=16, dtype="float32")


@pytest.mark.grid
def test_half_precision_passes():
    verify.verify_mixer("hawk", HawkConfig(), d_model=8, dtype="bfloat16")


def test_a_width_that_the_mixer_can_have(monkeypatch):
    """64 channels cannot be split into five heads."""
    monkeypatch.setattr(verify, "LENGTH", 3)
    verify.verify_mixer("attention", AttentionConfig(5), d_model=70, dtype="float32")


def test_complex_results_are_compared_whole():
    assert verify.relative_error(jnp.array([1 + 2j]), np.array([1 + 2j])) == 0
    assert verify.relative_error(jnp.array([1 + 2j]), np.array([1 + 1j])) == pytest.approx(0.5**0.5)


def test_nan_does_not_pass():
    with pytest.raises(verify.Mismatch, match="nan"):
        verify.require_close("x", jnp.array([1.0, jnp.nan]), np.ones(2), "float32")


@pytest.mark.grid
def test_a_model_and_its_decoding_pass_and_a_wrong_one_does_not(monkeypatch):
    config = LanguageModelConfig(
        pattern=(AttentionConfig(2),), n_layers=2, d_model=8, d_ff=8, max_len=20, vocab_size=9
    )
    assert verify.verify_model("small", config)
    assert verify.decoding_error(config) < verify.TOLERANCE["float32"]
    monkeypatch.setattr(reference, "norm", lambda params, x, kind, eps: x)
    with pytest.raises(verify.Mismatch, match="small differs"):
        verify.verify_model("small", config)


def test_a_small_model_is_as_wide_as_its_mixers_allow():
    config = LanguageModelConfig(
        pattern=(AttentionConfig(5),), n_layers=3, d_model=70, max_len=300, vocab_size=1000, dropout=0.5
    )
    small = verify.small_model(config)
    assert (small.n_layers, small.d_model, small.max_len) == (2, 70, verify.MAX_LEN)
    assert (small.vocab_size, small.dropout) == (verify.LARGEST_VOCABULARY, 0.0)
