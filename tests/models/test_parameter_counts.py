"""Published models without a shipped config; shipped configs are counted in `tests/test_config.py`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from grid import grid_but

from hyena_jax import models
from hyena_jax.config import (
    AttentionConfig,
    FastmaxConfig,
    GatedHyenaConfig,
    HyenaConfig,
    ImageClassifierConfig,
    LanguageModelConfig,
)


def count(config) -> int:
    model = models.build(config)
    image = isinstance(config, ImageClassifierConfig)
    inputs = (
        jnp.zeros((1, *config.image_size, config.channels)) if image else jnp.zeros((1, config.max_len), int)
    )
    params = jax.eval_shape(model.init, jax.random.key(0), inputs)["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(params))


VIT = ImageClassifierConfig(
    pattern=(AttentionConfig(n_heads=12, causal=False),), n_layers=12, d_model=768, ffn="gelu", d_ff=3072,
    image_size=(224, 224), channels=3, n_classes=1000, patch_size=(16, 16),
)  # fmt: skip
# Embedding, positions and an untied head with bias, but no final norm.
GATED = LanguageModelConfig(
    pattern=(GatedHyenaConfig(),), n_layers=2, d_model=64, ffn="gelu", d_ff=256, final_norm="none",
    max_len=256, vocab_size=1000, learned_positions=True, tied_head=False, head_bias=True, init="torch",
)  # fmt: skip
# Heads without bias, an output projection with one.
FASTMAX = ImageClassifierConfig(
    pattern=(FastmaxConfig(n_heads=5, standardize=False, causal=False),), n_layers=3, d_model=15,
    ffn="relu", d_ff=24, image_size=(28, 28), channels=1, n_classes=10, patch_size=(5, 5), init="xavier",
)  # fmt: skip
SIZES = {
    "gated_hyena": (GATED, 286_952),
    "fastmax_average_pool": (FASTMAX, 6_157),
    "fastmax_per_token": (replace(FASTMAX, head="per_token"), 6_157),
    # ViT-B/16 has 86,567,656: in addition a class token and its position.
    "vit_b": (VIT, 86_567_656 - 2 * 768),
    # Hyena-ViT, 78.5% on ImageNet-1k (Poli et al. 2023): 88M. Positions, the head on the mean over the
    # patches, and the shape of its filters (two directions, the defaults) are ours.
    "hyena_vit": (replace(VIT, pattern=(HyenaConfig(bidirectional=True),)), 88_069_912),
}


@pytest.mark.parametrize("name", grid_but(SIZES, "gated_hyena", "fastmax_average_pool"))
def test_published_models(name):
    config, size = SIZES[name]
    assert count(config) == size
