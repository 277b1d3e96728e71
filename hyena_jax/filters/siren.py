"""The filter of irhum/hyena: a sine network of time alone. Axes: L length, D channels, N filters."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import SirenFilterConfig
from hyena_jax.filters.long_filter import LongFilter, decay_rates, relative_time
from hyena_jax.ops.initializers import uniform_fan_in, uniform_within


class SirenFilter(LongFilter):
    """h = exp(-decay_d t/(Lmax-1)) ⊙ W sin(dense(... sin(w dense(s)))), at s = 2t/(Lmax-1) - 1.

    A SIREN (Sitzmann et al. 2020, arXiv 2006.09661) whose only input is time, from -1 to 1 over Lmax. The
    window's decays are constants, one for each channel, shared by its filters. Kernels are uniform, within
    1/sqrt(inputs) in the first layer, sqrt(6/inputs) in the hidden ones and sqrt(0.12/inputs) in the last;
    biases start at 0.

    Parameters:
      dense_0/kernel [1, width]: from time.
      dense_0/bias [width]:
      dense_1/kernel [width, width]: one of n_hidden hidden layers, by default four.
      dense_1/bias [width]:
      dense_2/kernel [width, width]:
      dense_2/bias [width]:
      dense_3/kernel [width, width]:
      dense_3/bias [width]:
      dense_4/kernel [width, width]:
      dense_4/bias [width]:
      dense_5/kernel [width, N*D]: the last layer; column d*N + o is filter o of channel d.
    """

    config: SirenFilterConfig = SirenFilterConfig()

    def setup(self) -> None:
        width = self.config.width
        hidden, last = (uniform_within((scale / width) ** 0.5) for scale in (6, 0.12))
        self.dense = [
            nn.Dense(width, kernel_init=uniform_fan_in(1)),
            *(nn.Dense(width, kernel_init=hidden) for _ in range(self.config.n_hidden)),
            nn.Dense(self.n_filters * self.d_model, use_bias=False, kernel_init=last),
        ]

    def taps_until(self, length: int) -> jax.Array:
        leaves = jax.tree.leaves(self.variables)  # none while they are initialised
        time = relative_time(length, self.max_len, leaves[0].dtype if leaves else jnp.float32)[:, None]
        hidden = jnp.sin(self.config.frequency * self.dense[0](2 * time - 1))
        for dense in self.dense[1:-1]:
            hidden = jnp.sin(dense(hidden))
        h = self.dense[-1](hidden).reshape(length, self.d_model, self.n_filters)
        decay = jnp.asarray(decay_rates(self.config, self.d_model), h.dtype)
        return (h * jnp.exp(time * decay)[..., None]).transpose(2, 1, 0)
