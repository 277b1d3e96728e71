"""Gated DeltaNet, DeltaNet and DeltaProduct; Gated DeltaNet-2; Kimi Delta Attention.

Axes: B batch, T tokens, D channels, n updates a token, H heads of queries and keys, G heads of values, K
channels of a key, V channels of a value, R inner width of decays and gate, J taps.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import GatedDelta2Config, GatedDeltaConfig, KDAConfig
from hyena_jax.mixers.inputs import sums_dtype
from hyena_jax.mixers.layers import GroupRMSNorm
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops.fast.dense import dense_dot_general
from hyena_jax.ops.initializers import a_log_init, dt_bias_init

GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}
# Added to the squared length of a query or key, as in the published code.
LENGTH_EPS = 1e-6


class GatedDelta(Mixer):
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464, section 3.4, figure 1).

    y = W_o ( RMSNorm(o) ⊙ SiLU(W_g x) ), and o is the output of the gated delta rule (`ops.delta_rule`) with

        q, k, v = SiLU( FIR_J(W x) ),  q and k of each head divided by their length,  q scaled by K^-1/2,
        beta = sigmoid(W_b x),  log a = -exp(a_log) softplus(W_a x + dt_bias).

    `config.factors` n > 1 makes n keys, values and beta of each token (DeltaProduct, 2502.10297).

    Parameters:
      qkv_proj/kernel [D, (1 + n)*H*K + n*G*V]: columns are queries, keys, values; of keys and of values,
        those of the first update come first, head after head.
      short_taps [(1 + n)*H*K + n*G*V, J]: tap 0 meets the current input.
      beta_proj/kernel [D, n*G]: W_b; the columns of the first update come first.
      decay_proj/kernel [D, G]: W_a, with decay.
      a_log [G]: with decay.
      dt_bias [G]: with decay.
      gate_proj/kernel [D, G*V]: W_g, with gate.
      norm/scale [V]: shared by the heads.
      out_proj/kernel [G*V, D]: W_o.
    """

    config: GatedDeltaConfig = GatedDeltaConfig()
    has_constant_state = True

    def setup(self) -> None:
        config, sizes = self.config, self.config.sizes(self.d_model)
        config.check(self.d_model, self.max_len)
        keys, values = sizes.keys * sizes.key_dim, sizes.values * sizes.value_dim
        init = nn.initializers.normal(0.02)  # of the published models, the FIR included
        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype, kernel_init=init)
        # The products that read x are followed by activations: see `ops.fast.dense`.
        inner = partial(dense, dot_general=dense_dot_general)
        channels = (1 + config.factors) * keys + config.factors * values
        self.qkv_proj, self.beta_proj = inner(channels), inner(config.factors * sizes.values)
        self.short_taps = self.param("short_taps", init, (channels, config.short_filter_len), jnp.float32)
        if config.decay:
            self.decay_proj = inner(sizes.values)
            self.a_log = self.param("a_log", a_log_init(0, 16), (sizes.values,))
            self.dt_bias = self.param("dt_bias", dt_bias_init, (sizes.values,))
        if config.gate:
            self.gate_proj = inner(values)
        self.norm = GroupRMSNorm(1, config.norm_eps)
        self.out_proj = dense(self.d_model)

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        config, sizes, (batch, length, _) = self.config, self.config.sizes(self.d_model), x.shape
        keys, rows = sizes.keys * sizes.key_dim, (batch, config.factors * length)
        u = seq.fir(self.qkv_proj(x), self.short_taps)
        dtype = sums_dtype(u.dtype)
        q, k, v = jnp.split(nn.silu(u).astype(dtype), [keys, (1 + config.factors) * keys], axis=-1)
        q = sizes.key_dim**-0.5 * unit_length(q.reshape(batch, length, sizes.keys, -1))
        k = unit_length(k.reshape(*rows, sizes.keys, -1))
        beta = jax.nn.sigmoid(self.beta_proj(x).astype(dtype)).reshape(*rows, sizes.values, 1)
        if config.negative_eigenvalues:
            beta = 2 * beta
        log_a = jnp.zeros((batch, length, sizes.values), dtype)
        if config.decay:
            rate = jax.nn.softplus(self.decay_proj(x).astype(dtype) + self.dt_bias.astype(dtype))
            log_a = -jnp.exp(self.a_log.astype(dtype)) * rate
        v = v.reshape(*rows, sizes.values, -1)
        if config.factors == 1:  # else several values enter at a token, each in its own way
            v = seq.values(v, "BTGd")
        read = beta * jnp.repeat(k, sizes.values // sizes.keys, axis=2)
        o = seq.mixed(seq.update(q, k, beta * v, log_a, read, chunk=config.chunk), "BTGd")
        o = self.norm(o).reshape(batch, length, -1)
        if config.gate:
            o = o * nn.silu(self.gate_proj(x).astype(dtype))
        return self.out_proj(o.astype(u.dtype))


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


def unit_length(x: jax.Array) -> jax.Array:
    """x [..., K] divided by its length."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + LENGTH_EPS)
