"""Initialisers that the published models use and Flax lacks."""

import jax
import jax.numpy as jnp
from flax.typing import Initializer


def uniform_fan_in(fan_in: int) -> Initializer:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)), PyTorch's default for dense and convolution layers."""
    bound = fan_in**-0.5

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init
