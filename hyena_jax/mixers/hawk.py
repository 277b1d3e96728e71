"""The recurrent block of Hawk and Griffin.

Axes: B batch, L length, T new tokens, D channels, W recurrence width, H blocks of the gates, I = W / H
channels of a block, K taps.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Initializer

from hyena_jax.config import HawkConfig
from hyena_jax.mixers.inputs import sums_dtype
from hyena_jax.mixers.layers import SplitDense
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.parallel import Parallel
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops.initializers import initializers
from hyena_jax.ops.rg_lru import RATE_SCALE, bounded_sqrt, factors
from hyena_jax.ops.shards import block_dense


class Hawk(Mixer):
    """The recurrent block of Hawk and Griffin (De et al. 2024, arXiv 2402.19427, section 2.3, figure 2c).

    y = W_o ( GELU(W_g x) ⊙ RGLRU( FIR_K(W_r x) ) ), and the RG-LRU of u (section 2.4) is

        r_t = sigmoid(W_a u_t + b_a),  i_t = sigmoid(W_x u_t + b_x),  log a_t = -8 r_t softplus(p),
        h_t = a_t ⊙ h_{t-1} + sqrt(1 - a_t^2) ⊙ (i_t ⊙ u_t).

    Not in the paper: `config.sign` replaces a_t in the last line, by 2 a_t - 1 with `shifted`, and by
    tanh(W_s u_t + b_s) a_t with `gate`.

    FIR_K is a depthwise filter of K taps with a bias; p is the argument of softplus in the released code, so
    that the paper's a = sigmoid(Lambda) is exp(-softplus(p)). Where a document starts h_t = i_t ⊙ u_t, since
    the input need not make room for an earlier one; at the start of a row, only with `config.reset_at_start`.

    Attributes:
      n_layers: scales the initial output projection by sqrt(2 / n_layers).
      dtype: of all dense layers, including the gates'; their sigmoids and the recurrence are in float32.

    Parameters:
      in_proj/kernel [D, 2*W]: columns are the GELU branch (W_g), the recurrent branch (W_r), W each.
      in_proj/bias [2*W]: with projection_bias.
      short_taps [W, K]: tap 0 meets the current input (libraries that cross-correlate store them reversed).
      short_bias [W]
      recurrence_gate/kernel [H, W//H, W//H]: block j maps channels j W/H .. (j+1) W/H - 1.
      recurrence_gate/bias [W]: with gate_bias.
      input_gate/kernel [H, W//H, W//H]: as recurrence_gate/kernel.
      input_gate/bias [W]: with gate_bias.
      sign_gate/kernel [H, W//H, W//H]: W_s, with sign `gate`; as recurrence_gate/kernel.
      sign_gate/bias [W]: b_s, with sign `gate`.
      rate [W]: p.
      out_proj/kernel [W, D]
      out_proj/bias [D]: with projection_bias.
    """

    config: HawkConfig = HawkConfig()
    has_constant_state = True

    def setup(self) -> None:
        config, width = self.config, self.width
        config.check(self.d_model, self.max_len)
        init = initializers("griffin", self.n_layers, self.d_model, width)
        bias, taps = config.projection_bias, config.short_filter_len
        self.in_proj = SplitDense(width, 2, self.dtype, init.kernel, use_bias=bias)
        fir_init = nn.initializers.normal((0.01 / taps) ** 0.5)
        self.short_taps = self.param("short_taps", fir_init, (width, taps), jnp.float32)
        self.short_bias = self.param("short_bias", nn.initializers.zeros, (width,), jnp.float32)
        self.recurrence_gate = BlockDense(config.gate_bias, self.dtype)
        self.input_gate = BlockDense(config.gate_bias, self.dtype)
        if config.sign == "gate":
            self.sign_gate = BlockDense(True, self.dtype)
        self.rate = self.param("rate", ring_init(config), (width,))
        self.out_proj = nn.Dense(self.d_model, use_bias=bias, dtype=self.dtype, kernel_init=init.out_kernel)

    @property
    def width(self) -> int:
        """W."""
        return self.config.width or self.d_model

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        gate, u = self.in_proj(x)
        # From here to the output the gates' blocks come first, [H, B, T, I]: a product for each block then
        # needs no transposed copy, which XLA for CPUs makes slowly.
        u = seq.fir(self._blocks(u), self.short_taps, self.short_bias, axis=-2)
        _, i, a, scale = self._gates(u, seq)
        # Where FIR and recurrence forget by themselves.
        starts = seq.starts(of_rows=self.config.reset_at_start)
        if starts is not None:
            scale = jnp.where(starts[..., None], 1, scale)
        u = seq.values(u, "HBTI")
        h = seq.recur(a, scale * (i * u.astype(a.dtype))).astype(u.dtype)
        y = jax.nn.gelu(gate, approximate=self.config.gelu == "tanh") * _join(h)
        return self.out_proj(seq.mixed(y, "BTW"))

    def _gates(self, u: jax.Array, seq: Sequence) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """r, i, a and sqrt(1 - a^2) of u [H, B, T, I]: float32."""
        dtype, sign, axis = sums_dtype(self.rate.dtype), self.config.sign, seq.sequence_axis
        r, i = self.recurrence_gate(u, axis), self.input_gate(u, axis)
        r, i = jax.nn.sigmoid(r.astype(dtype)), jax.nn.sigmoid(i.astype(dtype))
        s = jnp.tanh(self.sign_gate(u, axis).astype(dtype)) if sign == "gate" else None
        rate = self.rate.astype(dtype).reshape(self.config.gate_blocks, 1, 1, -1)
        a, rest = factors(r, rate, s, sign == "shifted")
        return r, i, a, bounded_sqrt(rest)

    def gates(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """r, i and the factors a of x [B, L, D], each [B, L, W], float32; a is not 0 at starts."""
        seq = Parallel(x.shape[:2], None, self.sequence_axis, self.forms)
        u = seq.fir(self._blocks(self.in_proj(x)[1]), self.short_taps, self.short_bias, axis=-2)
        return tuple(map(_join, self._gates(u, seq)[:3]))

    def _blocks(self, x: jax.Array) -> jax.Array:
        """x [..., W] as [H, ..., I]."""
        n_blocks = self.config.gate_blocks
        return jnp.moveaxis(x.reshape(*x.shape[:-1], n_blocks, self.width // n_blocks), -2, 0)


def _join(x: jax.Array) -> jax.Array:
    """[H, ..., I] as [..., W]."""
    x = jnp.moveaxis(x, 0, -2)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


class BlockDense(nn.Module):
    """A dense layer W -> W with a block-diagonal matrix: channels mix inside H groups.

    Starts as N(0, 1 / block width), bias 0.
    """

    use_bias: bool
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: jax.Array, sequence_axis: str | None = None) -> jax.Array:
        """y [H, B, T, I] of x [H, B, T, I], whose T may be sharded over a mesh axis."""
        n_blocks, width = x.shape[0], x.shape[-1]
        init, shape, bias = nn.initializers.normal(width**-0.5), (n_blocks, width, width), None
        kernel = self.param("kernel", init, shape, jnp.float32)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (n_blocks * width,), jnp.float32)
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        y = block_dense(x, kernel, sequence_axis)
        return y if bias is None else y + bias.reshape(n_blocks, 1, 1, width)


def ring_init(config: HawkConfig) -> Initializer:
    """The initialiser of p: a = exp(-softplus(p)), or a^8, is uniform by area between `config`'s radii."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        # Uniform by area: the square of the radius a is uniform.
        squared = jax.random.uniform(key, shape, dtype, config.min_radius**2, config.max_radius**2)
        log_a = 0.5 * jnp.log(squared)
        if config.ring == "a_to_c":
            log_a = log_a / RATE_SCALE
        return jnp.log(jnp.expm1(-log_a))  # the inverse of softplus

    return init
