"""The other mixers with long convolutions: FIR and S4D, which have no gates, and H3, which has two.

Axes: B batch, L length, T new tokens, D channels, H heads, d head_dim, M taps of the shift filter.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import FIRConfig, H3Config, S4DConfig
from hyena_jax.filters import build_filter
from hyena_jax.mixers.layers import FromChannelsFirst, ToChannelsFirst
from hyena_jax.mixers.mixer import LongConvolutionMixer
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops.initializers import initializers, uniform_fan_in


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


class H3(LongConvolutionMixer):
    """y = W_o (q ⊙ SSM_diag(SSM_shift(k) ⊙ v)) (Fu et al. 2023, arXiv 2212.14052, section 3.1).

    The shift state space is a FIR of M taps, taps_t = sum_i shift_c[i + t] shift_b[i], plus a skip. In heads
    of more than one channel the outer product of keys and values goes through the diagonal state space, one
    filter for each head, and is contracted with q over the key's channels.

    Parameters:
      qkv_proj/kernel [D, 3*D]: columns are q, k, v, D each; head h has channels h*d .. (h+1)*d - 1.
      qkv_proj/bias [3*D]:
      shift_b [D, M]: input weights of the shift register; start as 1, 0, 0, ...
      shift_c [D, M]: output weights of the shift register.
      shift_skip [D]: weight of the key itself.
      filter/*: one filter of H channels, one for each head.
      skip [H]: weight of the second convolution's own input.
      out_proj/kernel [D, D]:
      out_proj/bias [D]:
    """

    config: H3Config = H3Config()

    def setup(self) -> None:
        config, width = self.config, self.d_model
        config.check(width, self.max_len)
        n_taps, n_heads = config.n_taps, width // config.head_dim
        init = initializers("gpt2", self.n_layers, width, width)
        self.qkv_proj = ToChannelsFirst(width, 3, self.dtype, init.kernel)
        self.shift_b = self.param(
            "shift_b", lambda _: jnp.zeros((width, n_taps), jnp.float32).at[:, 0].set(1)
        )
        self.shift_c = self.param("shift_c", uniform_fan_in(n_taps), (width, n_taps))
        self.shift_skip = self.param("shift_skip", nn.initializers.normal(1.0), (width,), jnp.float32)
        self.filter = build_filter(1, n_heads, self.max_len, config.filter)
        self.skip = self.param("skip", nn.initializers.normal(1.0), (n_heads,), jnp.float32)
        self.out_proj = FromChannelsFirst(width, self.dtype, init.out_kernel)

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        q, k, v = self.qkv_proj(x)  # [D, B, T]
        # Taps [D, M] of the shift filter: the correlation of c with b, and the skip in lag 0.
        n_taps = self.config.n_taps
        padded = jnp.pad(self.shift_c, [(0, 0), (0, n_taps - 1)])
        windows = padded[:, jnp.arange(n_taps)[:, None] + jnp.arange(n_taps)]  # [D, lag, i]
        taps = jnp.einsum("dti,di->dt", windows, self.shift_b)
        shifted = seq.fir(k, taps.at[:, 0].add(self.shift_skip), axis=-1)
        q, shifted, v = (self._heads(part) for part in (q, shifted, v))
        v = seq.values(v, "dHBT")
        # [d, d, H, B, T]: heads last among the channel axes, because each head has one filter for all its d^2
        # channels.
        outer = shifted[:, None] * v
        filters = seq.filters(self.filter, self.skip[None])
        z = seq.conv(outer.reshape(-1, *v.shape[2:]), filters, 0)
        y = seq.mixed((q[:, None] * z.reshape(outer.shape)).sum(0), "dHBT")
        return self.out_proj(y.swapaxes(0, 1).reshape(-1, *y.shape[2:]))

    def _heads(self, x: jax.Array) -> jax.Array:
        """[D, B, T] -> [d, H, B, T]."""
        return x.reshape(-1, self.config.head_dim, *x.shape[1:]).swapaxes(0, 1)
