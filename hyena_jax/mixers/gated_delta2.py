"""Gated DeltaNet-2.

Axes: B batch, T tokens, D channels, H heads of queries and keys, G heads of values, K channels of a key, V
channels of a value, R inner width of decays and gate, J taps.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import GatedDelta2Config
from hyena_jax.mixers.gated_delta import unit_length
from hyena_jax.mixers.inputs import sums_dtype
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.norms import GroupRMSNorm
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops.fast.dense import dense_dot_general
from hyena_jax.ops.initializers import a_log_init, dt_bias_init

GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


class GatedDelta2(Mixer):
    """Gated DeltaNet-2 (2026, arXiv 2605.22791): what is erased and what is written have gates of their own.

    y = W_o ( RMSNorm(o) ⊙ gate(W_g2 W_g1 x + c) ), and o is the output of

        S_t = diag(a_t) S_{t-1} + k_t ( w_t ⊙ v_t - S_{t-1}^T diag(a_t) (b_t ⊙ k_t) )^T,  o_t = S_t^T q_t

    (`ops.delta_rule`) with

        q, k, v = SiLU( FIR_J(W x) ),  q and k of each head divided by their length,  q scaled by K^-1/2,
        b = sigmoid(W_b x),  w = sigmoid(W_w x),  log a = -exp(a_log) softplus(W_a2 W_a1 x + dt_bias).

    The gate is SiLU in NVIDIA's code, and sigmoid in flash-linear-attention's.

    Parameters:
      qkv_proj/kernel [D, 2*H*K + G*V]: columns are queries, keys, values, head after head.
      short_taps [2*H*K + G*V, J]: tap 0 meets the current input.
      erase_proj/kernel [D, H*K]: W_b.
      write_proj/kernel [D, G*V]: W_w.
      decay_down/kernel [D, R]: W_a1.
      decay_up/kernel [R, H*K]: W_a2.
      a_log [H]:
      dt_bias [H*K]:
      gate_down/kernel [D, R]: W_g1.
      gate_up/kernel [R, G*V]: W_g2.
      gate_up/bias [G*V]: c, with gate_bias.
      norm/scale [V]: shared by the heads.
      out_proj/kernel [G*V, D]: W_o.
    """

    config: GatedDelta2Config = GatedDelta2Config()
    has_constant_state = True

    def setup(self) -> None:
        config, sizes = self.config, self.config.sizes(self.d_model)
        config.check(self.d_model, self.max_len)
        keys, values = sizes.keys * sizes.key_dim, sizes.values * sizes.value_dim
        channels, rank = 2 * keys + values, config.gate_rank or sizes.value_dim
        init = nn.initializers.xavier_uniform()
        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype, kernel_init=init)
        # The products that read x are followed by activations: see `ops.fast.dense`.
        inner = partial(dense, dot_general=dense_dot_general)
        self.qkv_proj, self.erase_proj, self.write_proj = inner(channels), inner(keys), inner(values)
        taps = nn.initializers.normal(0.02)
        self.short_taps = self.param("short_taps", taps, (channels, config.short_filter_len), jnp.float32)
        self.decay_down, self.decay_up = inner(rank), inner(keys)
        self.a_log = self.param("a_log", a_log_init(1, 16), (sizes.keys,))
        self.dt_bias = self.param("dt_bias", dt_bias_init, (keys,))
        self.gate_down, self.gate_up = inner(rank), inner(values, use_bias=config.gate_bias)
        self.norm = GroupRMSNorm(1, config.norm_eps)
        self.out_proj = dense(self.d_model)

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        config, sizes, rows = self.config, self.config.sizes(self.d_model), x.shape[:2]
        keys = sizes.keys * sizes.key_dim
        u = seq.fir(self.qkv_proj(x), self.short_taps)
        dtype = sums_dtype(u.dtype)

        def of_heads(z: jax.Array, n_heads: int) -> jax.Array:
            return z.astype(dtype).reshape(*rows, n_heads, -1)

        q, k, v = jnp.split(nn.silu(u), [keys, 2 * keys], axis=-1)
        q, k = (unit_length(of_heads(z, sizes.keys)) for z in (q, k))
        erase = jax.nn.sigmoid(of_heads(self.erase_proj(x), sizes.keys))
        if config.negative_eigenvalues:
            erase = 2 * erase
        write = jax.nn.sigmoid(of_heads(self.write_proj(x), sizes.values))
        v = seq.values(write * of_heads(v, sizes.values), "BTGd")
        rate = of_heads(self.decay_up(self.decay_down(x)), sizes.keys)
        rate = jax.nn.softplus(rate + self.dt_bias.astype(dtype).reshape(sizes.keys, -1))
        log_a = -jnp.exp(self.a_log.astype(dtype))[:, None] * rate
        o = seq.update(sizes.key_dim**-0.5 * q, k, v, log_a, erase * k, chunk=config.chunk)
        o = self.norm(seq.mixed(o, "BTGd")).reshape(*rows, -1)
        o = o * GATES[config.gate](self.gate_up(self.gate_down(x)).astype(dtype))
        return self.out_proj(o.astype(u.dtype))
