"""A long filter with two numbers per channel: h_t = gain (1 + t)^-decay."""

from dataclasses import dataclass
from typing import Annotated

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from hyena_jax.config import Above, FilterConfig, register


@dataclass(frozen=True)
class PowerLawConfig(FilterConfig):
    decay: Annotated[float, Above(0)] = 1.0
    """Initial exponent of every channel."""


class PowerLaw(nn.Module):
    n_filters: int
    d_model: int
    max_len: int
    config: PowerLawConfig = PowerLawConfig()

    @nn.compact
    def __call__(self, length):
        shape = (self.n_filters, self.d_model, 1)
        decay = self.param("decay", nn.initializers.constant(self.config.decay), shape)
        gain = self.param("gain", nn.initializers.normal(1.0), shape)
        return gain * (1 + jnp.arange(length, dtype=gain.dtype)) ** -decay


def oracle(params, n_filters, length, max_len, config):
    return params["gain"] * (1.0 + np.arange(length)) ** -params["decay"]


register("power_law", PowerLawConfig, PowerLaw, oracle)
