"""Mixers of one long convolution without gates: FIR and S4D.

Axes: B batch, L length, T new tokens, D channels.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import FIRConfig, S4DConfig
from hyena_jax.filters import build_filter
from hyena_jax.initializers import initializers
from hyena_jax.mixers.dense import FromChannelsFirst, ToChannelsFirst
from hyena_jax.mixers.long import NO_SHORT_FIR, Convolutions, LongConvolutionMixer
from hyena_jax.mixers.mixing import Mixing


class FIR(LongConvolutionMixer):
    """y = W_o (h * (W_i x) + skip ⊙ (W_i x)): the plain convolution baseline.

    Attributes:
      config: see `FIRConfig`.

    Parameters:
      in_proj/kernel [D, D]:
      in_proj/bias [D]:
      filter/*: one filter of D channels.
      skip [1, D]: weight of the convolution's own input.
      out_proj/kernel [D, D]:
      out_proj/bias [D]:
    """

    config: FIRConfig = FIRConfig()
    short_shape = NO_SHORT_FIR

    def setup(self) -> None:
        config, width = self.config, self.d_model
        config.check(width, self.max_len)
        self.filter = build_filter(1, width, self.max_len, config.filter)
        self.skip = self.param("skip", nn.initializers.normal(1.0), (1, width), jnp.float32)
        init = initializers("gpt2", self.n_layers, width, width)
        self.in_proj = ToChannelsFirst(width, 1, self.dtype, init.kernel)
        self.out_proj = FromChannelsFirst(width, self.dtype, init.out_kernel)

    def mix(
        self, x: jax.Array, convolutions: Convolutions, deterministic: bool
    ) -> tuple[jax.Array, Convolutions]:
        (u,) = self.in_proj(x)
        y, convolutions = convolutions.long(convolutions.masked(u), 0)
        return self.out_proj(y), convolutions

    def mixing_matrix(self, x: jax.Array) -> Mixing:
        """One matrix for each channel, from W_i x to the output projection: the filter, at every position."""
        convolutions = self.parallel_convolutions(x.shape[1])
        return self.channel_matrices(lambda v: convolutions.long(v, 0)[0], self.in_proj(x)[0])


class S4D(LongConvolutionMixer):
    """y = GLU(W_o GELU(h * x + skip ⊙ x)), h a diagonal state space (Gu et al. 2022, arXiv 2206.11893).

    GLU(a, b) = a ⊙ sigmoid(b); GELU by erf, as in the published layer.

    Attributes:
      config: see `S4DConfig`.

    Parameters:
      filter/*: one filter of D channels.
      skip [1, D]: weight of the convolution's own input.
      out_proj/kernel [D, 2*D]: columns are a, then b.
      out_proj/bias [2*D]:
    """

    config: S4DConfig = S4DConfig()
    short_shape = NO_SHORT_FIR

    def setup(self) -> None:
        config, width = self.config, self.d_model
        config.check(width, self.max_len)
        self.filter = build_filter(1, width, self.max_len, config.filter)
        self.skip = self.param("skip", nn.initializers.normal(1.0), (1, width), jnp.float32)
        init = initializers("gpt2", self.n_layers, width, width)
        self.out_proj = FromChannelsFirst(2 * width, self.dtype, init.out_kernel)

    def mix(
        self, x: jax.Array, convolutions: Convolutions, deterministic: bool
    ) -> tuple[jax.Array, Convolutions]:
        x = x if self.dtype is None else x.astype(self.dtype)
        y, convolutions = convolutions.long(convolutions.masked(x.transpose(2, 0, 1)), 0)
        return nn.glu(self.out_proj(nn.gelu(y, approximate=False))), convolutions

    def mixing_matrix(self, x: jax.Array) -> Mixing:
        """One matrix for each channel, from x to the GELU: the filter, at every position."""
        x = x if self.dtype is None else x.astype(self.dtype)
        convolutions = self.parallel_convolutions(x.shape[1])
        return self.channel_matrices(lambda v: convolutions.long(v, 0)[0], x.transpose(2, 0, 1))
