"""Kimi Delta Attention.

Axes: B batch, T tokens, D channels, H heads of queries and keys, G heads of values, K channels of a key, V
channels of a value, R inner width of decays and gate, J taps.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import KDAConfig
from hyena_jax.mixers.gated_delta import unit_length
from hyena_jax.mixers.inputs import sums_dtype
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.norms import GroupRMSNorm
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops.fast.dense import dense_dot_general
from hyena_jax.ops.initializers import a_log_init, dt_bias_init


class KDA(Mixer):
    """Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692, section 3).

    y = W_o ( RMSNorm(o) ⊙ sigmoid(W_g2 W_g1 x + c) ), and o is the output of the delta rule
    (`ops.delta_rule`) with a decay for each channel of a key,

        q, k, v = SiLU( FIR_J(W x) ),  q and k of each head divided by their length,  q scaled by K^-1/2,
        beta = sigmoid(W_b x),  log a = -exp(a_log) softplus(W_a2 W_a1 x + dt_bias),

    or, with `config.decay_bound` b < 0, log a = b sigmoid(exp(a_log) (W_a2 W_a1 x + dt_bias)), as in
    flash-linear-attention with its safe gate.

    Parameters:
      qkv_proj/kernel [D, 2*H*K + G*V]: columns are queries, keys, values, head after head.
      short_taps [2*H*K + G*V, J]: tap 0 meets the current input.
      beta_proj/kernel [D, G]: W_b.
      decay_down/kernel [D, R]: W_a1.
      decay_up/kernel [R, G*K]: W_a2.
      a_log [G]:
      dt_bias [G*K]:
      gate_down/kernel [D, R]: W_g1.
      gate_up/kernel [R, G*V]: W_g2.
      gate_up/bias [G*V]: c, with gate_bias.
      norm/scale [V]: shared by the heads.
      out_proj/kernel [G*V, D]: W_o.
    """

    config: KDAConfig = KDAConfig()
    has_constant_state = True

    def setup(self) -> None:
        config, sizes = self.config, self.config.sizes(self.d_model)
        config.check(self.d_model, self.max_len)
        keys, values = sizes.keys * sizes.key_dim, sizes.values * sizes.value_dim
        channels, decays = 2 * keys + values, sizes.values * sizes.key_dim
        rank = config.gate_rank or sizes.value_dim
        init = nn.initializers.normal(0.02)
        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype, kernel_init=init)
        # The products that read x are followed by activations: see `ops.fast.dense`.
        inner = partial(dense, dot_general=dense_dot_general)
        self.qkv_proj, self.beta_proj = inner(channels), inner(sizes.values)
        self.short_taps = self.param("short_taps", init, (channels, config.short_filter_len), jnp.float32)
        self.decay_down, self.decay_up = inner(rank), inner(decays)
        a_log = a_log_init(1, 16) if config.decay_bound is None else nn.initializers.zeros
        self.a_log = self.param("a_log", a_log, (sizes.values,), jnp.float32)
        self.dt_bias = self.param("dt_bias", dt_bias_init, (decays,))
        self.gate_down, self.gate_up = inner(rank), inner(values, use_bias=config.gate_bias)
        self.norm = GroupRMSNorm(1, config.norm_eps)
        self.out_proj = dense(self.d_model)

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        config, sizes, rows = self.config, self.config.sizes(self.d_model), x.shape[:2]
        keys = sizes.keys * sizes.key_dim
        u = seq.fir(self.qkv_proj(x), self.short_taps)
        dtype = sums_dtype(u.dtype)
        q, k, v = jnp.split(nn.silu(u).astype(dtype), [keys, 2 * keys], axis=-1)
        q, k = (unit_length(z.reshape(*rows, sizes.keys, -1)) for z in (q, k))
        v = seq.values(v.reshape(*rows, sizes.values, -1), "BTGd")
        beta = jax.nn.sigmoid(self.beta_proj(x).astype(dtype))[..., None]
        if config.negative_eigenvalues:
            beta = 2 * beta
        rate = self.decay_up(self.decay_down(x)).astype(dtype) + self.dt_bias.astype(dtype)
        rate, scale = rate.reshape(*rows, sizes.values, -1), jnp.exp(self.a_log.astype(dtype))[:, None]
        if config.decay_bound is None:
            log_a = -scale * jax.nn.softplus(rate)
        else:
            log_a = config.decay_bound * jax.nn.sigmoid(scale * rate)
        read = beta * jnp.repeat(k, sizes.values // sizes.keys, axis=2)
        o = seq.update(sizes.key_dim**-0.5 * q, k, beta * v, log_a, read, chunk=config.chunk)
        o = self.norm(seq.mixed(o, "BTGd")).reshape(*rows, -1)
        o = o * jax.nn.sigmoid(self.gate_up(self.gate_down(x)).astype(dtype))
        return self.out_proj(o.astype(u.dtype))
