"""The annotated variant of Hyena: normalised gates, inner residual paths.

Axes: B batch, L length, T new tokens, D channels, N gates, K taps."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import AnnotatedHyenaConfig
from hyena_jax.filters import build_filter
from hyena_jax.mixers.dense import FromChannelsFirst, ToChannelsFirst
from hyena_jax.mixers.mixer import LongConvolutionMixer
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops.fast.derivatives import own_derivative, sum_products
from hyena_jax.ops.initializers import initializers, uniform_fan_in

# Least norm that a gate is divided by.
EPSILON = 1e-12


class AnnotatedHyena(LongConvolutionMixer):
    """Hyena with normalised gates and residual paths inside, to be stacked in blocks without residual paths.

    From The Annotated Hyena (expz/annotated-hyena), a commented implementation in PyTorch:
    z = FIR(W u + b) is split into x_1 .. x_N, v; v <- v + u; for n = 1..N,
    v <- v + x_n / max(||x_n||_2, 1e-12) ⊙ (h_n * v + b_n ⊙ v), the norm over channels; y = v + W_o v + b_o.

    Attributes:
      n_layers: of no effect: the published initialisation does not depend on the depth.

    Parameters:
      in_proj/kernel [D, (N+1)*D]: columns are x_1 .. x_N, v, D each.
      in_proj/bias [(N+1)*D]:
      short_taps [(N+1)*D, K]: tap 0 meets the current input (libraries that cross-correlate reverse them).
      short_bias [(N+1)*D]:
      filter/*: N filters of D channels; filter n acts with gate x_{n+1}.
      skip [N, D]: weight b_n of the convolution's own input.
      out_proj/kernel [D, D]:
      out_proj/bias [D]:
    """

    config: AnnotatedHyenaConfig = AnnotatedHyenaConfig()

    def setup(self) -> None:
        config, width = self.config, self.d_model
        config.check(width, self.max_len)
        n_parts, taps = config.order + 1, config.short_filter_len
        channels = n_parts * width
        init = initializers("torch", self.n_layers, width, width)
        self.in_proj = ToChannelsFirst(width, n_parts, self.dtype, init.kernel, init.bias)
        self.short_taps = self.param("short_taps", uniform_fan_in(taps), (channels, taps))
        self.short_bias = self.param("short_bias", uniform_fan_in(taps), (channels,))
        self.filter = build_filter(config.order, width, self.max_len, config.filter)
        self.skip = self.param("skip", nn.initializers.normal(1.0), (config.order, width), jnp.float32)
        self.out_proj = FromChannelsFirst(width, self.dtype, init.out_kernel, init.out_bias)

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        *gates, v = seq.fir(self.in_proj(x), self.short_taps, self.short_bias, axis=-1)
        v = seq.values(v + x.transpose(2, 0, 1).astype(v.dtype), "WBT")
        filters = seq.filters(self.filter, self.skip)
        for n, gate in enumerate(gates):
            v = v + normalized(gate) * seq.conv(v, filters, n)
        v = seq.mixed(v, "WBT")
        return v.transpose(1, 2, 0) + self.out_proj(v)


def normalized(gate: jax.Array) -> jax.Array:
    """gate [D, B, L] divided by max(its norm over D, 1e-12); a gate of zeros has finite gradients.

    The backward pass is written by hand because of its sum over D (see `sum_products`).
    """
    return own_derivative(_normalized, _normalized_pull_back)(gate)


def _normalized(gate: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    wide = gate.astype(jnp.float64 if gate.dtype == jnp.float64 else jnp.float32)
    square = sum_products(wide**2, 0)
    return (wide * jax.lax.rsqrt(jnp.maximum(square, EPSILON**2))).astype(gate.dtype), (gate, square)


def _normalized_pull_back(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array]:
    gate, square = residuals
    factor = jax.lax.rsqrt(jnp.maximum(square, EPSILON**2))
    y, wide_dy = gate.astype(square.dtype) * factor, dy.astype(square.dtype)
    along = jnp.where(square > EPSILON**2, sum_products(y * wide_dy, 0), 0)
    return ((factor * (wide_dy - y * along)).astype(gate.dtype),)
