"""Small image classifiers, one per mixer (fastmax: Gerami et al. 2024, arXiv 2402.07901).

    hyena-jax train images:fastmax --workdir runs/digits                          # no download
    hyena-jax train images:mnist_fastmax --workdir runs/mnist                     # needs 'hyena_jax[tfds]'
    hyena-jax train images:mnist_fastmax --workdir runs/mnist --data.path FOLDER  # a pair of IDX files

Digits take 1,500 steps. MNIST's published recipe takes 3,750: 2 epochs of 60,000 images, or 13 epochs of the
first 9,000 images of its test files. experiments/images compares the mixers at equal parameters.
"""

from dataclasses import replace
from typing import NamedTuple

from hyena_jax.config import (
    HYENA_GROUPS,
    AdamWConfig,
    AttentionConfig,
    ConstantConfig,
    CosineConfig,
    Experiment,
    FastmaxConfig,
    GatedHyenaConfig,
    HyenaConfig,
    ImageClassifierConfig,
    ImagesConfig,
    ImplicitFilterConfig,
    MixerConfig,
    ParameterGroup,
    TrainingConfig,
)
from hyena_jax.system.errors import choose

FASTMAX = FastmaxConfig(n_heads=5, p=2, standardize=False, causal=False)
# An odd polynomial is negative below some q.k, so sums of weights may vanish. With standardised queries and
# keys of at most 6 channels, q.k / 6 is between -1 and 1, where no degree is negative.
ODD_FASTMAX = replace(FASTMAX, standardize=True, scale=1 / 6)
SOFTMAX = AttentionConfig(n_heads=5, qkv_bias=False, causal=False, init="xavier")
HYENA = HyenaConfig(bidirectional=True, filter=ImplicitFilterConfig(emb_dim=9, width=16))


class Mixing(NamedTuple):
    """A mixer and its parameter groups."""

    mixer: MixerConfig
    groups: tuple[ParameterGroup, ...] = ()


MIXERS = {
    "fastmax": Mixing(FASTMAX),
    "fastmax_p1": Mixing(replace(ODD_FASTMAX, p=1)),
    "fastmax_p3": Mixing(replace(ODD_FASTMAX, p=3)),
    "softmax": Mixing(SOFTMAX),
    "hyena": Mixing(HYENA, HYENA_GROUPS),
    "gated": Mixing(GatedHyenaConfig(causal=False)),
}

# The published recipe: 28 x 28 pixels in 25 patches, 2 epochs of 60,000 images, constant learning rate.
MNIST = Experiment(
    model=ImageClassifierConfig(
        n_layers=3, d_model=15, ffn="relu", d_ff=24, patch_size=(5, 5), init="xavier"
    ),
    data=ImagesConfig(name="mnist", batch_size=32),
    optimizer=AdamWConfig(
        learning_rate=1e-3,
        schedule=ConstantConfig(warmup_steps=0),
        b2=0.999,
        weight_decay=0.01,
        clip_norm=None,
    ),
    training=TrainingConfig(
        steps=3750, eval_every=375, eval_batch_size=500, checkpoint_every=1875, log_every=25
    ),
)
# For 8 x 8 pixels in 16 patches: wider, and 33 epochs of 1,437 images with a cosine schedule.
DIGITS = Experiment(
    model=replace(MNIST.model, d_model=30, d_ff=60, patch_size=(2, 2)),
    data=ImagesConfig(name="digits", batch_size=32),
    optimizer=replace(
        MNIST.optimizer,
        learning_rate=3e-3,
        schedule=CosineConfig(warmup_steps=50, final_fraction=1 / 30),
        weight_decay=0.3,
    ),
    training=replace(MNIST.training, steps=1500, eval_every=150, checkpoint_every=500),
)
VARIANTS = {name: (DIGITS, mixing) for name, mixing in MIXERS.items()} | {
    f"mnist_{name}": (MNIST, mixing) for name, mixing in MIXERS.items()
}


def get_config(variant: str = "fastmax") -> Experiment:
    """The experiment that `variant` names: a mixer on digits, or on MNIST if it begins with mnist_."""
    recipe, (mixer, groups) = choose("variant", variant, VARIANTS)
    return replace(
        recipe,
        model=replace(recipe.model, pattern=(mixer,)),
        optimizer=replace(recipe.optimizer, groups=groups),
    )
