"""The autoencoder equals its oracle, which reconstructs every id from the last output alone."""

import dataclasses

import jax
import numpy as np
import pytest
from grid import in_grid
from oracles import mixers_of, random_params
from tolerances import assert_close

from hyena_jax import models
from hyena_jax.config import AttentionConfig, AutoencoderConfig, HyenaConfig
from hyena_jax.reference import models as reference
from hyena_jax.system.errors import UserError

CONFIG = AutoencoderConfig(
    pattern=(AttentionConfig(2),), n_layers=1, d_model=8, d_ff=12, max_len=11, vocab_size=7
)
TOKENS = np.random.default_rng(3).integers(0, 7, (3, 9), dtype=np.int32)
VARIANTS = {
    "layer": CONFIG,
    "rms_positions": dataclasses.replace(CONFIG, learned_positions=True, norm="rms", final_norm="rms"),
    "two_mixers": dataclasses.replace(
        CONFIG, pattern=(HyenaConfig(), AttentionConfig(2)), n_layers=2, ffn="none", d_ff=None
    ),
}


@pytest.mark.parametrize("name", ["layer", *in_grid("rms_positions", "two_mixers")])
def test_equals_its_oracle(name):
    config = VARIANTS[name]
    params = random_params(config, TOKENS)
    expected = reference.autoencoder(params, TOKENS, config, mixers_of(config))
    logits = jax.jit(models.build(config).apply)({"params": params}, TOKENS)
    assert logits.shape == (3, 9, 7)
    assert_close(logits, expected)


def test_what_does_not_fit_is_refused_by_name():
    for options, message in (({"d_model": 2}, "d_model must be even"), ({"vocab_size": 1}, "vocab_size")):
        with pytest.raises(UserError, match=message):
            dataclasses.replace(CONFIG, **options)
    model, params = models.build(CONFIG), {"params": random_params(CONFIG, TOKENS)}
    with pytest.raises(UserError, match=r"sequence length must be in 1..max_len=11, got 12"):
        model.apply(params, np.zeros((1, 12), np.int32))
    with pytest.raises(UserError, match="segment_ids must be None"):
        model.apply(params, TOKENS, TOKENS)
    with pytest.raises(UserError, match="tokens.dtype must be an integer type"):
        model.apply(params, TOKENS.astype(np.float32))
