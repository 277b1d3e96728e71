"""Mixers of one long convolution without gates: FIR and S4D.

Axes: B batch, L length, T new tokens, D channels.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import FIRConfig, S4DConfig
from hyena_jax.filters import build_filter
from hyena_jax.mixers.dense import FromChannelsFirst, ToChannelsFirst
from hyena_jax.mixers.mixer import LongConvolutionMixer
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops.initializers import initializers


class FIR(LongConvolutionMixer):
    """y = W_o (h * (W_i x) + skip ⊙ (W_i x)): the plain convolution baseline.

    Parameters:
      in_proj/kernel [D, D]:
      in_proj/bias [D]:
      filter/*: one filter of D channels.
      skip [1, D]: weight of the convolution's own input.
      out_proj/kernel [D, D]:
      out_proj/bias [D]:
    """

    config: FIRConfig = FIRConfig()

    def setup(self) -> None:
        config, width = self.config, self.d_model
        config.check(width, self.max_len)
        self.filter = build_filter(1, width, self.max_len, config.filter)
        self.skip = self.param("skip", nn.initializers.normal(1.0), (1, width), jnp.float32)
        init = initializers("gpt2", self.n_layers, width, width)
        self.in_proj = ToChannelsFirst(width, 1, self.dtype, init.kernel)
        self.out_proj = FromChannelsFirst(width, self.dtype, init.out_kernel)

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        u = seq.values(self.in_proj(x)[0], "WBT")
        y = seq.conv(u, seq.filters(self.filter, self.skip), 0)
        return self.out_proj(seq.mixed(y, "WBT"))


class S4D(LongConvolutionMixer):
    """y = GLU(W_o GELU(h * x + skip ⊙ x)), h a diagonal state space (Gu et al. 2022, arXiv 2206.11893).

    GLU(a, b) = a ⊙ sigmoid(b); GELU by erf, as in the published layer.

    Parameters:
      filter/*: one filter of D channels.
      skip [1, D]: weight of the convolution's own input.
      out_proj/kernel [D, 2*D]: columns are a, then b.
      out_proj/bias [2*D]:
    """

    config: S4DConfig = S4DConfig()

    def setup(self) -> None:
        config, width = self.config, self.d_model
        config.check(width, self.max_len)
        self.filter = build_filter(1, width, self.max_len, config.filter)
        self.skip = self.param("skip", nn.initializers.normal(1.0), (1, width), jnp.float32)
        init = initializers("gpt2", self.n_layers, width, width)
        self.out_proj = FromChannelsFirst(2 * width, self.dtype, init.out_kernel)

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        x = x if self.dtype is None else x.astype(self.dtype)
        u = seq.values(x.transpose(2, 0, 1), "WBT")
        y = seq.mixed(seq.conv(u, seq.filters(self.filter, self.skip), 0), "WBT")
        return nn.glu(self.out_proj(nn.gelu(y, approximate=False)))
