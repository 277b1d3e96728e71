"""The Hyena operator: gated long convolutions; and its annotated and its gated variant.

Axes: B batch, L length, T new tokens, D channels, W inner width, N gates, F filters, H heads, K taps.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import AnnotatedHyenaConfig, GatedHyenaConfig, HyenaConfig
from hyena_jax.filters import build_filter
from hyena_jax.mixers.layers import FromChannelsFirst, ToChannelsFirst
from hyena_jax.mixers.mixer import LongConvolutionMixer
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops.fast.derivatives import own_derivative, sum_products
from hyena_jax.ops.initializers import initializers, uniform_fan_in
from hyena_jax.system.errors import require

ACTIVATIONS = {
    "none": lambda x: x,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_tanh": nn.gelu,
    "relu": nn.relu,
    "silu": nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": nn.sigmoid,
}
# Least norm that a gate of the annotated variant is divided by.
EPSILON = 1e-12


class Hyena(LongConvolutionMixer):
    """Order-N gated long convolutions (Poli et al. 2023, arXiv 2302.10866).

    A dense projection to (N+1) W channels and a depthwise FIR give the gates x_i and the signal v:

    - `conv_first` (equation 6), gates x_1..x_N: v <- x_n ⊙ (h_n * v + b_n ⊙ v) for n = 1..N; F = N;
    - `gate_first` (the published code), gates x_0..x_{N-1}: for o = 0..N-2,
      g = v ⊙ x_{N-1-o}, v <- h_o * g + b_o ⊙ g; then v <- v ⊙ x_0; F = N - 1;

    and a dense projection of v, after the activation, is the output. Order 2 of irhum/hyena (Flax; two long
    filters, four projections) is `gate_first` of order 3.

    Head i holds channels i W/H .. (i+1) W/H - 1, and all heads share their W/H filters and skips.

    - `outer_mixing` replaces each gate but x_0 of `gate_first` by the sum of its head's channels;
    - `post_order_ffn` mixes the heads after convolution o: v_g <- sum_h order_mix[o, h, g] v_h;
    - `n_blocks` splits the sequence into blocks of max_len / n_blocks steps, whatever its own length;
    - `bidirectional` adds a convolution of the reversed sequence, with the second half of the filters; both
      halves have a lag 0.

    With `filter_groups`, channel c of a head of w channels has filter c // (w / filter_groups).

    StripedHyena 2 (Ku et al. 2025, arXiv 2503.01868) has `gate_first` of order 2, no biases of projection and
    FIR, and three filters: `short` of 7 taps in groups, without skip; `short` of 128 taps in groups, with
    decay; and `real_modal`. LFM2's gated short convolution (2511.23404) is `short` of 3 taps with
    `short_filter_len=0`, without biases and skip; its columns are then C, B, v.

    Parameters:
      in_proj/kernel [D, (N+1)*W]: columns are the gates in ascending order, then v, W each.
      in_proj/bias [(N+1)*W]: with in_bias.
      short_taps [(N+1)*W, K]: tap 0 meets the current input (libraries that cross-correlate reverse them);
        not with short_filter_len 0.
      short_bias [(N+1)*W]: with short_bias.
      filter/*: F filters of W/H channels, or of filter_groups channels; 2 F if bidirectional, the F of the
        future last. Filter o acts at step o of the recurrence.
      skip [F, W//H]: weight b_o of the convolution's own input (the published code keeps these flat, channel
        by channel: reshape(W//H, F) and transpose); with skip.
      order_mix [F, H, H]: from head (second axis) to head (third); only with post_order_ffn (the published
        code has N, of which `gate_first` uses the first F).
      out_proj/kernel [W, D]:
      out_proj/bias [D]: with out_bias.
    """

    config: HyenaConfig = HyenaConfig()

    @staticmethod
    def is_unbounded(config: HyenaConfig) -> bool:
        """As in the base class, with a single block: a state does not restart at block boundaries."""
        return config.n_blocks == 1 and LongConvolutionMixer.is_unbounded(config)

    def setup(self) -> None:
        config = self.config
        config.check(self.d_model, self.max_len)
        n_parts, taps = config.order + 1, config.short_filter_len
        channels = n_parts * self.width
        init = initializers(config.init, self.n_layers, self.d_model, self.width)
        self.in_proj = ToChannelsFirst(
            self.width, n_parts, self.dtype, init.kernel, init.bias, config.in_bias
        )
        if taps:
            taps_init = bias_init = uniform_fan_in(taps)
            if config.short_init == "lecun_normal":
                taps_init = nn.initializers.lecun_normal(in_axis=1, out_axis=0)
                bias_init = nn.initializers.zeros
            self.short_taps = self.param("short_taps", taps_init, (channels, taps))
            self.short_bias = jnp.zeros(channels)
            if config.short_bias:
                self.short_bias = self.param("short_bias", bias_init, (channels,))
        directions = 2 if config.bidirectional else 1
        head_dim = self.width // config.n_heads
        groups = config.filter_groups or head_dim
        self.filter = build_filter(directions * self.n_filters, groups, self.max_len, config.filter)
        self.skip = None
        if config.skip:
            self.skip = self.param(
                "skip", nn.initializers.normal(1.0), (self.n_filters, head_dim), jnp.float32
            )
        if config.post_order_ffn:
            shape = (self.n_filters, config.n_heads, config.n_heads)
            self.order_mix = self.param(
                "order_mix", nn.initializers.normal(head_dim**-0.5), shape, jnp.float32
            )
        self.dropout = nn.Dropout(config.dropout)
        self.out_dropout = nn.Dropout(config.out_dropout)
        self.out_proj = FromChannelsFirst(
            self.d_model, self.dtype, init.out_kernel, init.out_bias, config.out_bias
        )

    @property
    def width(self) -> int:
        """W, the inner width."""
        return self.config.inner_factor * self.d_model

    @property
    def n_filters(self) -> int:
        """F, without the filters of the future."""
        return self.config.order if self.config.gating == "conv_first" else self.config.order - 1

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        config, parts = self.config, self.in_proj(x)
        if config.short_filter_len:
            parts = seq.fir(parts, self.short_taps, self.short_bias, axis=-1)
        *gates, v = parts
        block_len = None if config.n_blocks == 1 else self.max_len // config.n_blocks
        filters = seq.filters(self.filter, self.skip, self._by_channel, block_len, config.bidirectional)
        if not config.post_order_ffn:  # which leaves no matrix for each channel
            v = seq.values(v, "WBT")
        if config.gating == "conv_first":
            for o in range(self.n_filters):
                v = self._mix_heads(seq.conv(self.dropout(v, deterministic), filters, o), o)
                v = v * self._over_head(gates[o])
        else:
            for o in range(self.n_filters):
                v = v * self._over_head(gates[self.n_filters - o])
                v = self._mix_heads(seq.conv(self.dropout(v, deterministic), filters, o), o)
            v = v * gates[0]
        v = ACTIVATIONS[config.activation](seq.mixed(v, "WBT"))
        return self.out_proj(self.out_dropout(v, deterministic))

    def _by_channel(self, x: jax.Array) -> jax.Array:
        """x [F, groups, ...] of filters as [F, w, ...] of the channels that they serve."""
        if self.config.filter_groups is None:
            return x
        return jnp.repeat(x, self.width // self.config.n_heads // self.config.filter_groups, axis=1)

    def _over_head(self, gate: jax.Array) -> jax.Array:
        """The gate [W, B, T]; with outer mixing, each channel holds the sum over its head."""
        if not self.config.outer_mixing:
            return gate
        heads = self._heads(gate)
        return jnp.broadcast_to(heads.sum(1, keepdims=True), heads.shape).reshape(gate.shape)

    def _mix_heads(self, v: jax.Array, o: int) -> jax.Array:
        """v [W, B, T] with its heads mixed by `order_mix[o]`; v itself without post_order_ffn."""
        if not self.config.post_order_ffn:
            return v
        weights = self.order_mix[o].astype(v.dtype)
        return jnp.einsum("hwbt,hg->gwbt", self._heads(v), weights).reshape(v.shape)

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.config.n_heads, -1, *x.shape[1:])


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

    def forward(gate: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        wide = gate.astype(jnp.float64 if gate.dtype == jnp.float64 else jnp.float32)
        square = sum_products(wide**2, 0)
        return (wide * jax.lax.rsqrt(jnp.maximum(square, EPSILON**2))).astype(gate.dtype), (gate, square)

    def pull_back(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array]:
        gate, square = residuals
        factor = jax.lax.rsqrt(jnp.maximum(square, EPSILON**2))
        y, wide_dy = gate.astype(square.dtype) * factor, dy.astype(square.dtype)
        along = jnp.where(square > EPSILON**2, sum_products(y * wide_dy, 0), 0)
        return ((factor * (wide_dy - y * along)).astype(gate.dtype),)

    return own_derivative(forward, pull_back)(gate)


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
