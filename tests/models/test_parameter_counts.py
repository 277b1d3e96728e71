"""Published models without a shipped config; shipped configs are counted in `tests/test_config.py`."""

import jax
import jax.numpy as jnp
import pytest

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


def test_gated_variant_of_hyena():
    """Embedding, positions and an untied head with bias, but no final norm."""
    config = LanguageModelConfig(
        pattern=(GatedHyenaConfig(),), n_layers=2, d_model=64, ffn="gelu", d_ff=256, final_norm="none",
        max_len=256, vocab_size=1000, learned_positions=True, tied_head=False, head_bias=True, init="torch",
    )  # fmt: skip
    assert count(config) == 286_952


@pytest.mark.parametrize("head", ["average_pool", "per_token"])
def test_fastmax_on_mnist(head):
    """Heads without bias, an output projection with one."""
    config = ImageClassifierConfig(
        pattern=(FastmaxConfig(n_heads=5, standardize=False, causal=False),), n_layers=3, d_model=15,
        ffn="relu", d_ff=24, image_size=(28, 28), channels=1, n_classes=10, patch_size=(5, 5), head=head,
        init="xavier",
    )  # fmt: skip
    assert config.max_len == 25
    assert count(config) == 6_157


@pytest.mark.grid
@pytest.mark.parametrize(
    ("mixer", "size"),
    [
        # ViT-B/16 has 86,567,656: in addition a class token and its position.
        (AttentionConfig(n_heads=12, causal=False), 86_567_656 - 2 * 768),
        # Hyena-ViT, 78.5% on ImageNet-1k (Poli et al. 2023): 88M.
        (HyenaConfig(bidirectional=True), 88_069_912),
    ],
)
def test_vit_b_and_its_hyena(mixer, size):
    """The sizes of ViT-B are published; positions, the head on the mean over the patches, and the shape of
    Hyena's filters (two directions, the defaults of `ImplicitFilterConfig`) are ours."""
    config = ImageClassifierConfig(
        pattern=(mixer,), n_layers=12, d_model=768, ffn="gelu", d_ff=3072, image_size=(224, 224), channels=3,
        n_classes=1000, patch_size=(16, 16),
    )  # fmt: skip
    assert count(config) == size
