"""Softmax multi-head attention: to all keys, or to the keys in a window.

Axes: B batch, T tokens, D channels, H heads, G heads of keys and values, d = D / H channels of a head, Q and
N channels over which queries and keys are normalised: d, or with qk_norm "all" H*d and G*d.
"""

import jax
import jax.numpy as jnp

from hyena_jax.config import AttentionConfig, LocalAttentionConfig
from hyena_jax.mixers.layers import RMSNorm, attention_layers
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops.attention import rotary


class Attention(Mixer):
    """Multi-head attention (Vaswani et al. 2017, arXiv 1706.03762, section 3.2), causal or not.

    y = W_o o, and for each head

        o_t = sum_s softmax_s(q_t . k_s / sqrt(d)) v_s,  with q, k, v = W x.

    Of the first hard_alibi_heads, head h = 0, 1, ... sees the keys t - h <= s <= t alone (Hard-ALiBi, Jelassi
    et al. 2024, arXiv 2402.01032, with the windows of the released code).

    Groups of heads can share keys and values (Ainslie et al. 2023, arXiv 2305.13245), or all heads can
    (Shazeer 2019, arXiv 1911.02150). Positions are rotary, or absent. The softmax is in float32.

    Parameters:
      qkv_proj/kernel [D, (H + 2*G)*d]: columns are the H queries, the G keys, the G values, d each.
      qkv_proj/bias [(H + 2*G)*d]: with qkv_bias.
      q_norm/scale [Q]: with qk_norm_eps, the factor of the queries' norm less 1.
      k_norm/scale [N]: with qk_norm_eps, likewise of the keys.
      out_proj/kernel [D, D]
      out_proj/bias [D]: with out_bias.
    """

    config: AttentionConfig | LocalAttentionConfig = AttentionConfig()

    @property
    def window(self) -> int | None:
        """How many keys before its own a query sees; None: all."""
        return None

    def setup(self) -> None:
        config, d_model = self.config, self.d_model
        config.check(d_model, self.max_len)
        width = (config.n_heads + 2 * self.n_kv_heads) * d_model // config.n_heads
        self.qkv_proj, self.out_proj = attention_layers(self, width, config.qkv_bias, config.out_bias)
        if config.qk_norm_eps is not None:
            self.q_norm = RMSNorm(config.qk_norm_eps, self.dtype)
            self.k_norm = RMSNorm(config.qk_norm_eps, self.dtype)

    @property
    def n_kv_heads(self) -> int:
        """G."""
        return self.config.n_kv_heads or self.config.n_heads

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        config, n_heads = self.config, self.config.n_heads
        qkv = self.qkv_proj(x).reshape(*x.shape[:2], n_heads + 2 * self.n_kv_heads, -1)
        q, k, v = jnp.split(qkv, [n_heads, n_heads + self.n_kv_heads], axis=2)
        if config.qk_norm_eps is not None:
            q, k = (self._normalised(*both) for both in ((self.q_norm, q), (self.k_norm, k)))
        n_rotated = round(config.rotary_fraction * q.shape[-1])
        if n_rotated:  # padding and earlier documents count as positions: only differences matter
            q, k = (
                rotary(z, seq.index, n_rotated, config.rotary_base, config.rotary_scaling) for z in (q, k)
            )
        v, few, shared = seq.values(v, "BTGd"), config.hard_alibi_heads, n_heads // self.n_kv_heads
        heads = [v[:, :, :1]] if few else []  # head 0 sees its own key alone
        for h in range(1, few):
            one = slice(h // shared, h // shared + 1)
            window = h if self.window is None else min(h, self.window)
            heads.append(seq.attend(q[:, :, h : h + 1], k[:, :, one], v[:, :, one], window))
        k, v = k[:, :, few // shared :], v[:, :, few // shared :]
        heads.append(seq.attend(q[:, :, few:], k, v, self.window, config.causal))
        o = jnp.concatenate(heads, axis=2)
        return self.out_proj(seq.mixed(o, "BTHd").reshape(x.shape))

    def _normalised(self, norm: RMSNorm, z: jax.Array) -> jax.Array:
        """Queries or keys z [B, T, H, d], over the channels of a head or of all heads."""
        if self.config.qk_norm == "head":
            return norm(z)
        return norm(z.reshape(*z.shape[:2], -1)).reshape(z.shape)


class LocalAttention(Attention):
    """Attention to the last `window` keys and the query's own (Griffin: arXiv 2402.19427, section 2.3).

    The state holds S = min(window + 1, max_len) keys.
    """

    config: LocalAttentionConfig = LocalAttentionConfig()
    # With a window of max_len or more, decoding sees the last max_len keys, the most that it was trained on.
    has_constant_state = True

    @property
    def window(self) -> int:
        return self.config.window
