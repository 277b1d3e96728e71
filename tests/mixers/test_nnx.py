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


@pytest.mark.parametrize(
    "config",
    [HyenaConfig(), *in_grid(HawkConfig(), AttentionConfig(2), GatedDeltaConfig(2), AFTSimpleConfig())],
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

    model = Residual()
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    shapes = jax.eval_shape(mixer.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, params["mixer"]) == jax.tree.map(jnp.shape, shapes)
    expected = jax.jit(linen)(params, x)
    assert_close(model(x), expected)
    assert_close(nnx.jit(lambda model, x: model(x))(model, x), expected)

    gradients = nnx.jit(nnx.grad(lambda model: jnp.square(model(x)).sum()))(model)
    expected = jax.jit(jax.grad(lambda params: jnp.square(linen(params, x)).sum()))(params)
    jax.tree.map(assert_close, nnx.to_pure_dict(gradients), expected)
