"""The filter of the gated variant of Hyena. Axes: L length, D channels, N filters, F rows of the table."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import LookupFilterConfig
from hyena_jax.filters.long_filter import LongFilter
from hyena_jax.ops.initializers import uniform_fan_in


class LookupFilter(LongFilter):
    """h(t) = dense(GELU(dense(table(t)))), a learned table over time and a small network; GELU by erf.

    Parameters:
      table [width, Lmax]: column t holds the features of lag t.
      dense_0/kernel [width, D]:
      dense_0/bias [D]:
      dense_1/kernel [D, N*D]: column d*N + o is filter o of channel d.
      dense_1/bias [N*D]:
    """

    config: LookupFilterConfig = LookupFilterConfig()

    def setup(self) -> None:
        width = self.config.width
        self.table = self.param("table", nn.initializers.normal(1.0), (width, self.max_len), jnp.float32)
        self.dense = [_dense(self.d_model, width), _dense(self.n_filters * self.d_model, self.d_model)]

    def taps_until(self, length: int) -> jax.Array:
        hidden = nn.gelu(self.dense[0](self.table[:, :length].T), approximate=False)
        h = self.dense[1](hidden)
        return h.reshape(length, self.d_model, self.n_filters).transpose(2, 1, 0)


def _dense(features: int, fan_in: int) -> nn.Dense:
    init = uniform_fan_in(fan_in)
    return nn.Dense(features, kernel_init=init, bias_init=init)
