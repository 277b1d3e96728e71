import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from grid import grid_but, in_grid
from oracles import mixers_of, random_params, with_dropout
from tolerances import assert_close

from hyena_jax import models
from hyena_jax.config import AttentionConfig, HyenaConfig, ImageClassifierConfig, ImplicitFilterConfig
from hyena_jax.reference import models as reference
from hyena_jax.system.errors import UserError

FILTER = ImplicitFilterConfig(emb_dim=3, width=4)
# 3 x 3 patches; one row and two columns of pixels are left over.
CONFIG = ImageClassifierConfig(
    pattern=(AttentionConfig(2, causal=False),), n_layers=1, d_model=8, d_ff=12, image_size=(7, 11),
    channels=2, n_classes=5, patch_size=(2, 3),
)  # fmt: skip
IMAGES = np.random.default_rng(7).standard_normal((4, 7, 11, 2), np.float32)
pytestmark = pytest.mark.xdist_group("image_classifier")  # its tests share compiled programs
VARIANTS = {
    "average_pool": CONFIG,
    "per_token": dataclasses.replace(CONFIG, head="per_token", ffn="relu", init="xavier"),
    "no_positions_rms": dataclasses.replace(CONFIG, learned_positions=False, norm="rms", final_norm="rms"),
    "patches_of_one_pixel": dataclasses.replace(CONFIG, patch_size=(1, 1)),
    "two_mixers": dataclasses.replace(
        CONFIG, pattern=(HyenaConfig(filter=FILTER), AttentionConfig(2)), n_layers=2
    ),
    "one_patch": dataclasses.replace(CONFIG, patch_size=(7, 11)),
}


def init(config: ImageClassifierConfig = CONFIG):
    return random_params(config, IMAGES)


@partial(jax.jit, static_argnums=2)
def logits_of(params, images, config: ImageClassifierConfig = CONFIG):
    return models.build(config).apply({"params": params}, images)


@pytest.mark.parametrize("name", grid_but(VARIANTS, "average_pool", "per_token"))
def test_equals_its_oracle(name):
    config = VARIANTS[name]
    params = init(config)
    expected = reference.image_classifier(params, np.asarray(IMAGES), config, mixers_of(config))
    logits = logits_of(params, IMAGES, config)
    assert logits.shape == ((4, config.max_len, 5) if config.head == "per_token" else (4, 5))
    assert_close(logits, expected)


@pytest.mark.parametrize("name", in_grid("average_pool", "per_token", "one_patch"))
def test_derivatives_in_both_modes(name):
    """Of what is not a mixer, each of which has its own test."""
    config = VARIANTS[name]
    with jax.enable_x64(True):
        model, args = models.build(config), (init(config), IMAGES)
        check_modes(lambda args: model.apply({"params": args[0]}, args[1]), args)


def test_bfloat16_activations_keep_float32_parameters_and_logits():
    half = dataclasses.replace(CONFIG, dtype="bfloat16")
    params = init(half)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits = logits_of(params, IMAGES, half)
    assert logits.dtype == jnp.float32
    assert_close(logits, logits_of(params, IMAGES), "bfloat16")


def test_dropout_needs_its_key_and_is_off_when_deterministic():
    model, params = models.build(dataclasses.replace(CONFIG, dropout=0.5)), init()
    sure, (once, again, other) = with_dropout(model, params, IMAGES, np.array([0, 0, 1]))
    assert_close(sure, logits_of(params, IMAGES))
    np.testing.assert_array_equal(once, again)
    assert not np.array_equal(once, other)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((7, 11, 2), "images must be of rank 4, .B, height, width, colours., got .7, 11, 2."),
        ((1, 11, 7, 2), "image size must be .7, 11., got .11, 7."),
        ((1, 7, 11, 3), "colours must be channels=2, got 3"),
    ],
)
def test_wrong_images_are_refused_by_name(shape, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(models.build(CONFIG).init, jax.random.key(0), jnp.zeros(shape))


def test_segments_and_what_the_data_must_decide_are_refused():
    with pytest.raises(ValueError, match="segment_ids must be None: an image has no documents"):
        jax.eval_shape(models.build(CONFIG).init, jax.random.key(0), IMAGES, jnp.zeros((4, 9), jnp.int32))
    for name in ("image_size", "channels", "n_classes"):
        with pytest.raises(UserError, match=f"{name} must be known when a model is built, got None"):
            models.build(dataclasses.replace(CONFIG, **{name: None}))


@pytest.mark.wide
@pytest.mark.parametrize("patch_size", [(1, 6), (3, 1)])
def test_init_rwkv7_scales_by_all_inputs_of_a_patch(patch_size):
    """Orthogonal kernels times sqrt(max(1, outputs / inputs)), half of that in the head."""
    config = dataclasses.replace(CONFIG, patch_size=patch_size, n_classes=9, init="rwkv7")
    params = jax.jit(models.build(config).init)(jax.random.key(0), IMAGES)["params"]
    n_inputs = 2 * int(np.prod(patch_size))
    for kernel, gain in (
        (params["patches"]["kernel"].reshape(n_inputs, 8), max(1, 8 / n_inputs) ** 0.5),
        (params["head"]["kernel"], 0.5 * (9 / 8) ** 0.5),
    ):
        values = np.linalg.svd(kernel, compute_uv=False)
        assert_close(values, np.full(len(values), gain))
