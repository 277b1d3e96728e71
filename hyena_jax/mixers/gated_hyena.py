"""The gated variant of Hyena: a gate between a long and a short convolution.

Axes: B batch, L length, T new tokens, D channels, K taps."""

import jax
import jax.numpy as jnp

from hyena_jax.config import GatedHyenaConfig
from hyena_jax.filters import build_filter
from hyena_jax.mixers.dense import FromChannelsFirst, ToChannelsFirst
from hyena_jax.mixers.mixer import LongConvolutionMixer
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops.initializers import initializers, uniform_fan_in
from hyena_jax.system.errors import require


class GatedHyena(LongConvolutionMixer):
    """A gate that interpolates between a long and a short convolution.

    v, g = split(W_in x); y = (k * v) ⊙ g + s ⊙ (1 - g), with k one long filter without skip and s a depthwise
    FIR of x itself; a dense layer of y is the output. In the original, an implementation without a paper, the
    FIR is centred and reads (K-1)/2 steps ahead, as with `causal=False`; the default does not.

    Attributes:
      n_layers: of no effect: the published initialisation does not depend on the depth.

    Parameters:
      in_proj/kernel [D, 2*D]: columns are v, then g.
      in_proj/bias [2*D]:
      short_taps [D, K]: tap 0 meets the current input; of a centred FIR, the input (K-1)/2 steps ahead.
      short_bias [D]:
      filter/*: one filter of D channels.
      out_proj/kernel [D, D]:
      out_proj/bias [D]:
    """

    config: GatedHyenaConfig = GatedHyenaConfig()

    def setup(self) -> None:
        config, width = self.config, self.d_model
        config.check(width, self.max_len)
        is_shardable = config.causal or self.sequence_axis is None
        require(is_shardable, "causal", config.causal, "True with a sequence_axis")
        taps = config.short_filter_len
        init = initializers("torch", self.n_layers, width, width)
        self.in_proj = ToChannelsFirst(width, 2, self.dtype, init.kernel, init.bias)
        self.short_taps = self.param("short_taps", uniform_fan_in(taps), (width, taps))
        self.short_bias = self.param("short_bias", uniform_fan_in(taps), (width,))
        self.filter = build_filter(1, width, self.max_len, config.filter)
        self.out_proj = FromChannelsFirst(width, self.dtype, init.out_kernel, init.out_bias)

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        if not self.config.causal:
            seq.refuse_documents()
        v, gate = self.in_proj(x)
        u = x.transpose(2, 0, 1).astype(v.dtype)
        long = seq.conv(v, seq.filters(self.filter, None), 0)
        # Of a centred FIR, output t is that of a causal one at t + ahead.
        ahead = 0 if self.config.causal else (self.config.short_filter_len - 1) // 2
        padded = jnp.pad(u, [(0, 0), (0, 0), (0, ahead)])
        short = seq.fir(padded, self.short_taps, self.short_bias, axis=-1)
        return self.out_proj(long * gate + short[..., ahead:] * (1 - gate))
