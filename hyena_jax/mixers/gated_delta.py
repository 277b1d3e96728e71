"""Gated DeltaNet, DeltaNet and DeltaProduct.

Axes: B batch, T tokens, D channels, n updates a token, H heads of queries and keys, G heads of values, K
channels of a key, V channels of a value, J taps.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import GatedDeltaConfig
from hyena_jax.mixers.inputs import sums_dtype
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.norms import GroupRMSNorm
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops.fast.dense import dense_dot_general
from hyena_jax.ops.initializers import a_log_init, dt_bias_init

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


def unit_length(x: jax.Array) -> jax.Array:
    """x [..., K] divided by its length."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + LENGTH_EPS)
