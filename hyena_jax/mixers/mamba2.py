"""Mamba-2.

Axes: B batch, T tokens, D channels, W inner width, H heads, P = W / H channels of a head, G groups of heads
that share B and C, N state size, J taps.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import Mamba2Config
from hyena_jax.mixers.inputs import sums_dtype
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.norms import GroupRMSNorm
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops.fast.dense import dense_dot_general
from hyena_jax.ops.initializers import a_log_init, dt_bias_init, uniform_fan_in


class Mamba2(Mixer):
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, sections 5 to 7, figure 6).

    y = W_o RMSNorm( o ⊙ SiLU(z) ), with z, x, B, C, dt = W_i x and x, B, C <- SiLU( FIR_J(x, B, C) ), and for
    each head the memory h [P, N] and the output are

        h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,  o_t = h_t C_t + skip x_t,
        A = -exp(a_log),  dt = softplus(dt + dt_bias).

    This is the rule of `ops.delta_rule` without erasing: queries C, keys B, values dt x.

    Parameters:
      in_proj/kernel [D, 2*W + 2*G*N + H]: columns are z, x, B, C, dt; x head after head, B and C group after
        group.
      short_taps [W + 2*G*N, J]: of x, B, C; tap 0 meets the current input.
      short_bias [W + 2*G*N]:
      a_log [H]:
      dt_bias [H]:
      skip [H]: weight of a head's x in its output (D in the published code).
      norm/scale [W]:
      out_proj/kernel [W, D]:
    """

    config: Mamba2Config = Mamba2Config()
    has_constant_state = True

    def setup(self) -> None:
        config, width = self.config, self.width
        config.check(self.d_model, self.max_len)
        heads, channels = config.n_heads, width + 2 * config.n_groups * config.d_state
        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype)
        # The product is followed by activations: see `ops.fast.dense`.
        self.in_proj = dense(
            width + channels + heads,
            kernel_init=uniform_fan_in(self.d_model),
            dot_general=dense_dot_general,
        )
        # The published code divides the initial weights by the square root of the depth.
        self.out_proj = dense(self.d_model, kernel_init=uniform_fan_in(self.n_layers * width))
        fir_init = uniform_fan_in(config.short_filter_len)
        self.short_taps = self.param("short_taps", fir_init, (channels, config.short_filter_len))
        self.short_bias = self.param("short_bias", fir_init, (channels,))
        self.a_log = self.param("a_log", a_log_init(1, 16), (heads,))
        self.dt_bias = self.param("dt_bias", dt_bias_init, (heads,))
        self.skip = self.param("skip", nn.initializers.ones, (heads,), jnp.float32)
        self.norm = GroupRMSNorm(config.n_groups, config.norm_eps)

    @property
    def width(self) -> int:
        """W."""
        return self.config.inner_factor * self.d_model

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        config, width, (batch, length, _) = self.config, self.width, x.shape
        states = config.n_groups * config.d_state
        z, u, dt = jnp.split(self.in_proj(x), [width, 2 * (width + states)], axis=-1)
        activations, dtype = u.dtype, sums_dtype(u.dtype)
        u = seq.fir(u, self.short_taps, self.short_bias)
        u, b, c = jnp.split(nn.silu(u).astype(dtype), [width, width + states], axis=-1)
        b, c = (part.reshape(batch, length, config.n_groups, config.d_state) for part in (b, c))
        u = seq.values(u.reshape(batch, length, config.n_heads, -1), "BTHd")
        dt = jax.nn.softplus(dt.astype(dtype) + self.dt_bias.astype(dtype))
        if config.dt_limit is not None:
            dt = jnp.clip(dt, *config.dt_limit)
        log_a = -jnp.exp(self.a_log.astype(dtype)) * dt
        o = seq.update(c, b, dt[..., None] * u, log_a, chunk=config.chunk)
        o = seq.mixed(o + self.skip.astype(dtype)[:, None] * u, "BTHd").reshape(batch, length, width)
        y = self.norm(o * nn.silu(z.astype(dtype)))
        return self.out_proj(y.astype(activations))
