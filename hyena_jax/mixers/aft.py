"""The four mixers of the attention-free transformer.

    y_t = W_o ( sigmoid(q_t) ⊙ mean_t ) + b_o
    mean_t = sum_{s<=t} exp(k_s + w_{t,s}) ⊙ v_s / sum_{s<=t} exp(k_s + w_{t,s})

From Zhai et al. 2021, arXiv 2105.14103. The four differ in the position biases w, and therefore in the memory
that decoding needs:

    AFT-simple   w_{t,s} = 0                                                 running sums
    AFT-full     w_{t,s} = u_t . v_s                                         all keys and values
    AFT-local    w_{t,s} = u_t . v_s            where t - s < K, else 0      the last K - 1, and running sums
    AFT-conv     w^h_{t,s} = gamma_h (p^h_{t-s} - mean(p^h)) / std(p^h) + beta_h
                                                where t - s < K, else 0      the last K - 1, and running sums

AFT-conv has one key for each head. Axes: B batch, L length, T new tokens, D channels, H heads (1 except in
AFT-conv), c channels of a head's key, d of its value, K the window or the taps, R rank.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import AFTConvConfig, AFTFullConfig, AFTLocalConfig, AFTSimpleConfig
from hyena_jax.mixers.inputs import sums_dtype, within
from hyena_jax.mixers.layers import attention_layers
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops import aft, shards
from hyena_jax.ops.fast.aft_blocks import Window, blockwise_sums, no_window, window_sums

# The paper initialises the parameters of position biases as N(0, 10^-2); we take 10^-2 as the variance.
position_init = nn.initializers.normal(0.1)


class AFT(Mixer):
    """All four; a subclass adds the sums over keys.

    Parameters:
      qkv_proj/kernel [D, 3*D]: columns are queries, keys, values, D each.
      qkv_proj/bias [3*D]: likewise.
      out_proj/kernel [D, D]
      out_proj/bias [D]
    """

    config: AFTSimpleConfig | AFTConvConfig | AFTLocalConfig | AFTFullConfig

    def setup(self) -> None:
        self.config.check(self.d_model, self.max_len)
        width = 2 * self.d_model + math.prod(self.key_shape)
        self.qkv_proj, self.out_proj = attention_layers(self, width)

    @property
    def key_shape(self) -> tuple[int, int]:
        """H and c."""
        return 1, self.d_model

    def sums(self, keys: jax.Array, values: jax.Array, seq: Sequence) -> aft.Sums:
        """The sums of each token over keys [B, T, H, c] and values [B, T, H, d]."""
        raise NotImplementedError

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        z = self.qkv_proj(x)
        dtype = sums_dtype(z.dtype)
        q, k, v = jnp.split(z.astype(dtype), [self.d_model, z.shape[-1] - self.d_model], axis=-1)
        keys = seq.masked(k.reshape(*x.shape[:2], *self.key_shape), fill=aft.EMPTY)
        values = seq.values(v.reshape(*x.shape[:2], self.key_shape[0], -1), "BTHC")
        mean = aft.mean(self.sums(keys, values, seq)).reshape(q.shape)
        y = seq.mixed(nn.sigmoid(q) * mean, "BTC")
        return self.out_proj(y.astype(z.dtype))


class AFTSimple(AFT):
    """AFT-simple: w = 0. The state is the running sums, constant in the length."""

    config: AFTSimpleConfig = AFTSimpleConfig()
    has_constant_state = True

    def sums(self, keys: jax.Array, values: jax.Array, seq: Sequence) -> aft.Sums:
        document = seq.positions - seq.index  # a number of its own for each document of a row

        def run(before: aft.Sums) -> tuple[aft.Sums, aft.Sums]:
            sums = aft.running_sums(keys, values, before, document)
            return sums, jax.tree.map(lambda x: x[:, -1:], sums)

        def whole() -> aft.Sums:
            return shards.running_sums(keys, values, document, seq.sequence_axis)

        return seq.carry("sums", lambda: aft.no_sums(keys, values), run, whole)


class AFTFull(AFT):
    """AFT-full: w_{t,s} = u_t . v_s. The state is a cache of all keys and values.

    Parameters:
      position_queries [Lmax, R]: u, by the position of the query.
      position_keys [Lmax, R]: v, by the position of the key.
    """

    config: AFTFullConfig = AFTFullConfig()

    def setup(self) -> None:
        super().setup()
        shape = (self.max_len, self.config.rank)
        self.position_queries = self.param("position_queries", position_init, shape, jnp.float32)
        self.position_keys = self.param("position_keys", position_init, shape, jnp.float32)

    def sums(self, keys: jax.Array, values: jax.Array, seq: Sequence) -> aft.Sums:
        keys, values = seq.cache(keys, fill=aft.EMPTY), seq.cache(values)
        return blockwise_sums(keys, values, self.bias(), seq.positions, seq.position)

    def bias(self) -> aft.Bias:
        return aft.low_rank_bias(self.position_queries, self.position_keys)


class AFTLocal(AFTFull):
    """AFT-local: w_{t,s} = u_t . v_s where t - s < window, and 0, not minus infinity, beyond."""

    config: AFTLocalConfig = AFTLocalConfig()

    def sums(self, keys: jax.Array, values: jax.Array, seq: Sequence) -> aft.Sums:
        window = min(self.config.window, self.max_len)
        if seq.is_online:  # there are no biases beyond max_len
            values = within(values, seq.position + values.shape[1], self.max_len)
        return sums_in_window(keys, values, seq, self.bias(), window)


class AFTConv(AFT):
    """AFT-conv: one key per head, and w^h_{t,s} = tap t - s of head h, 0 beyond the last of K taps.

    The taps are the parameters, standardised over K, times gamma, plus beta; gamma and beta start as 0.

    Parameters:
      qkv_proj/kernel [D, 2*D + H]: columns are queries, D, one key per head, H, and values, D.
      qkv_proj/bias [2*D + H]: likewise.
      position_taps [H, K]: tap 0 meets the current token.
      position_scale [H]: gamma.
      position_bias [H]: beta.
    """

    config: AFTConvConfig = AFTConvConfig()
    has_constant_state = True

    def setup(self) -> None:
        super().setup()
        n_heads, zeros = self.config.n_heads, nn.initializers.zeros
        shape = (n_heads, self.config.n_taps)
        self.position_taps = self.param("position_taps", position_init, shape, jnp.float32)
        self.position_scale = self.param("position_scale", zeros, (n_heads,), jnp.float32)
        self.position_bias = self.param("position_bias", zeros, (n_heads,), jnp.float32)

    @property
    def key_shape(self) -> tuple[int, int]:
        return self.config.n_heads, 1

    def sums(self, keys: jax.Array, values: jax.Array, seq: Sequence) -> aft.Sums:
        taps = aft.standardize_taps(self.position_taps, self.position_scale, self.position_bias)
        return sums_in_window(keys, values, seq, aft.tap_bias(taps), self.config.n_taps)


def sums_in_window(
    keys: jax.Array, values: jax.Array, seq: Sequence, bias: aft.Bias, window: int
) -> aft.Sums:
    """The sums of each token with `bias` to the last K = `window` keys, and w = 0 to those before."""

    def run(before: Window) -> tuple[aft.Sums, Window]:
        return window_sums(keys, values, bias, seq.positions, before, window)

    return seq.carry("sums", lambda: no_window(keys, values, window), run)
