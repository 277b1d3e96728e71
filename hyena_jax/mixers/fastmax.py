"""Fastmax: attention with a polynomial kernel.

Axes: B batch, L length, T new tokens, D channels, H heads, d head_dim, M features."""

import jax
import jax.numpy as jnp

from hyena_jax.config import FastmaxConfig
from hyena_jax.mixers.inputs import sums_dtype
from hyena_jax.mixers.layers import attention_layers
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops import fastmax, shards
from hyena_jax.ops.attention import same_segment
from hyena_jax.system.errors import require


class Fastmax(Mixer):
    """Attention with a polynomial kernel (Gerami et al. 2024, arXiv 2402.07901).

    o_t = sum_s f(scale q_t . k_s) v_s / sum_s f(scale q_t . k_s), f(x) = sum_{l=0..p} x^l / l!, with queries
    and keys standardised over the channels of their head, and f in float32. Decoding costs O(M d) per token
    and head, M = C(d+p, p), at any length, and gives the same values for both forms, `factorized` or not.

    With segment_ids the quadratic form is used, O(L^2): sums over keys cannot tell documents apart.

    Parameters:
      qkv_proj/kernel [D, 3*D]: columns are queries, keys, values, D each, head after head.
      qkv_proj/bias [3*D]: with qkv_bias.
      out_proj/kernel [D, D]: the output projection.
      out_proj/bias [D]: likewise.
    """

    config: FastmaxConfig = FastmaxConfig()
    has_constant_state = True

    def setup(self) -> None:
        config = self.config
        config.check(self.d_model, self.max_len)
        self.qkv_proj, self.out_proj = attention_layers(
            self, 3 * self.d_model, config.qkv_bias, config.out_bias
        )

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        config, axis = self.config, seq.sequence_axis
        heads = self.qkv_proj(x).reshape(*x.shape[:2], 3, config.n_heads, -1)
        heads = heads.astype(sums_dtype(heads.dtype))
        q, k, v = (heads[:, :, i] for i in range(3))
        if config.standardize:
            q, k = fastmax.standardize(q), fastmax.standardize(k)
        scale = q.shape[-1] ** -0.5 if config.scale is None else config.scale
        q, k = q * scale**0.5, k * scale**0.5
        v = seq.values(v, "BTHd")

        def empty() -> jax.Array:
            return fastmax.no_sums(k, config.p)

        def run(sums: jax.Array) -> tuple[jax.Array, jax.Array]:
            return fastmax.fastmax_causal(q, k, v, config.p, sums, seq.real)

        def whole() -> jax.Array:
            if config.factorized and seq.documents is None:
                attend = shards.fastmax_causal if config.causal else shards.fastmax_bidirectional
                return attend(q, k, v, config.p, axis)
            require(axis is None or config.factorized, "factorized", False, "True with a sequence_axis")
            require(axis is None, "segment_ids", "given", "None with a sequence_axis")
            mask = jnp.ones((q.shape[1], q.shape[1]), bool)
            if config.causal:
                mask = jnp.tril(mask)
            if seq.documents is not None:
                mask = mask & same_segment(seq.documents.number)
            return fastmax.fastmax_quadratic(q, k, v, config.p, mask)

        o = seq.carry("sums", empty, run, whole)
        return self.out_proj(seq.mixed(o, "BTHd").reshape(x.shape).astype(self.dtype or x.dtype))
