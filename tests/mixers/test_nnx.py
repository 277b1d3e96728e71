"""Mixers inside Flax NNX, by its bridge: values and gradients are those of Linen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from grid import in_grid
from tolerances import assert_close

from hyena_jax.config import AFTSimpleConfig, AttentionConfig, GatedDeltaConfig, HawkConfig, HyenaConfig
from hyena_jax.mixers import mixer_class


@pytest.mark.wide
@pytest.mark.parametrize(
    "config",
    [AFTSimpleConfig(), *in_grid(HawkConfig(), AttentionConfig(2), GatedDeltaConfig(2), HyenaConfig())],
)
def test_a_mixer_works_in_nnx(config):
    """In a module of NNX, around which its own parameters have gradients too."""
    mixer = mixer_class(config)(8, 32, config)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 19, 8)), jnp.float32)

    class Residual(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.full(8, 0.5))
            self.mixer = nnx.bridge.ToNNX(mixer, rngs=nnx.Rngs(0)).lazy_init(x)

        def __call__(self, x):
            return x + self.scale[...] * self.mixer(x)

    def linen(params, x):
        return x + params["scale"] * mixer.apply({"params": params["mixer"]}, x)

    model = nnx.jit(Residual)()
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def squares(y):
        return jnp.square(y).sum(), y

    (_, y), gradients = nnx.jit(nnx.value_and_grad(lambda model: squares(model(x)), has_aux=True))(model)
    of_linen = jax.jit(jax.value_and_grad(lambda params: squares(linen(params, x)), has_aux=True))
    (_, expected_y), expected = of_linen(params)
    jax.tree.map(assert_close, (y, nnx.to_pure_dict(gradients)), (expected_y, expected))
