"""Whole models in NumPy against the Flax modules with the same parameters."""

import jax
import numpy as np
import pytest
from tolerances import assert_close

from hyena_jax import models
from hyena_jax.config import (
    AnnotatedHyenaConfig,
    GatedHyenaConfig,
    HawkConfig,
    HyenaConfig,
    ImplicitFilterConfig,
    LanguageModelConfig,
    LookupFilterConfig,
)
from hyena_jax.mixers import mixer_oracle
from hyena_jax.reference.models import language_model

SIZES = {"d_model": 6, "max_len": 11, "vocab_size": 13, "n_layers": 2}
CHAINED = {"norm": "none", "ffn": "none", "d_ff": None, "residual": False, "learned_positions": True}
CONFIGS = {
    "hyena": LanguageModelConfig(
        pattern=(HyenaConfig(filter=ImplicitFilterConfig(emb_dim=3, width=4)),), d_ff=7, **SIZES
    ),
    "annotated_hyena": LanguageModelConfig(
        pattern=(AnnotatedHyenaConfig(),), init="torch", **CHAINED, **SIZES
    ),
    "gated_hyena": LanguageModelConfig(
        pattern=(GatedHyenaConfig(filter=LookupFilterConfig(width=3)),),
        ffn="gelu",
        d_ff=7,
        final_norm="none",
        learned_positions=True,
        tied_head=False,
        head_bias=True,
        init="torch",
        **SIZES,
    ),
    "hawk": LanguageModelConfig(
        pattern=(HawkConfig(),), norm="rms", final_norm="rms", ffn="geglu", d_ff=7, **SIZES
    ),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name):
    config = CONFIGS[name]
    model = models.build(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, config.max_len))
    params = model.init(jax.random.key(0), tokens)["params"]
    logits = model.apply({"params": params}, tokens)
    oracle = mixer_oracle(config.pattern[0])
    mixers = [lambda params, x: oracle(params, x, config.max_len)]
    expected = language_model(jax.tree.map(np.asarray, params), tokens, config, mixers)
    assert_close(logits, expected)
