"""The four mixers of the attention-free transformer.

    y_t = W_o ( sigmoid(q_t) ⊙ sum_{s<=t} exp(k_s + w_{t,s}) v_s / sum_{s<=t} exp(k_s + w_{t,s}) ) + b_o

From Zhai et al. 2021, arXiv 2105.14103. The four differ in the position biases w, and therefore in the memory
that decoding needs. Axes: B batch, L length, T new tokens, D channels, H heads (1 except in AFT-conv), c
channels of a head's key, d of its value, K the window or the taps, R rank.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import AFTConvConfig, AFTFullConfig, AFTLocalConfig, AFTSimpleConfig
from hyena_jax.initializers import initializers
from hyena_jax.mixers.inputs import sums_dtype, within
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops import aft, shards
from hyena_jax.ops.aft_blocks import full_sums, window_sums

# The paper initialises the parameters of position biases as N(0, 10^-2); we take 10^-2 as the variance.
position_init = nn.initializers.normal(0.1)


class AFT(Mixer):
    """All four; a subclass adds the sums over keys.

    Attributes:
      config: see the config of each.
      n_layers: initialisers of the output projection may depend on it.
      dtype: of the activations; None follows the input. Sums and states stay in float32.
    """

    config: AFTSimpleConfig | AFTConvConfig | AFTLocalConfig | AFTFullConfig

    def setup(self) -> None:
        self.config.check(self.d_model, self.max_len)
        init = initializers(self.config.init, self.n_layers, self.d_model, self.d_model)
        self.qkv_proj = nn.Dense(
            2 * self.d_model + self.key_width,
            dtype=self.dtype,
            kernel_init=init.kernel,
            bias_init=init.bias,
        )
        self.out_proj = nn.Dense(
            self.d_model, dtype=self.dtype, kernel_init=init.out_kernel, bias_init=init.out_bias
        )

    @property
    def n_heads(self) -> int:
        """H."""
        return 1

    @property
    def key_width(self) -> int:
        """H c, the channels of a token's keys."""
        return self.d_model

    def sums(self, keys: jax.Array, values: jax.Array, seq: Sequence) -> aft.Sums:
        """The sums of each token over keys [B, T, H, c] and values [B, T, H, d]."""
        raise NotImplementedError

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        z = self.qkv_proj(x)
        q, *rest = jnp.split(z, [self.d_model, self.d_model + self.key_width], axis=-1)
        dtype = sums_dtype(z.dtype)
        keys, values = (a.astype(dtype).reshape(*x.shape[:2], self.n_heads, -1) for a in rest)
        keys = seq.masked(keys, fill=aft.EMPTY)
        mean = aft.mean(self.sums(keys, seq.values(values, "BTHC"), seq)).reshape(q.shape)
        y = seq.mixed(nn.sigmoid(q.astype(dtype)) * mean, "BTC")
        return self.out_proj(y.astype(q.dtype))


def places(seq: Sequence) -> aft.Places:
    """The place of each token; where none are packed, a row is one document."""
    number = jnp.zeros_like(seq.positions) if seq.documents is None else seq.documents.number
    return aft.Places(seq.positions, number)


class AFTSimple(AFT):
    """AFT-simple: w = 0. The state is the running sums, constant in the length.

    Parameters:
      qkv_proj/kernel [D, 3*D]: columns are queries, keys, values, D each.
      qkv_proj/bias [3*D]: likewise.
      out_proj/kernel [D, D]
      out_proj/bias [D]
    """

    config: AFTSimpleConfig = AFTSimpleConfig()

    @staticmethod
    def is_unbounded(config: AFTSimpleConfig) -> bool:
        """Decoding may continue beyond max_len: the state does not grow."""
        return True

    def sums(self, keys: jax.Array, values: jax.Array, seq: Sequence) -> aft.Sums:
        document = places(seq).document

        def run(before: aft.Sums) -> tuple[aft.Sums, aft.Sums]:
            sums = aft.running_sums(keys, values, before, document)
            return sums, jax.tree.map(lambda x: x[:, -1:], sums)

        def whole() -> aft.Sums:
            return shards.running_sums(keys, values, document, seq.sequence_axis)

        return seq.carry("sums", lambda: aft.no_sums(keys, values), run, whole)


class AFTFull(AFT):
    """AFT-full: w_{t,s} = u_t . v_s. The state is a cache of all keys and values.

    Parameters:
      qkv_proj/kernel [D, 3*D]: columns are queries, keys, values, D each.
      qkv_proj/bias [3*D]: likewise.
      position_queries [Lmax, R]: u, by the position of the query.
      position_keys [Lmax, R]: v, by the position of the key.
      out_proj/kernel [D, D]
      out_proj/bias [D]
    """

    config: AFTFullConfig = AFTFullConfig()

    def setup(self) -> None:
        super().setup()
        shape = (self.max_len, self.config.rank)
        self.position_queries = self.param("position_queries", position_init, shape, jnp.float32)
        self.position_keys = self.param("position_keys", position_init, shape, jnp.float32)

    def sums(self, keys: jax.Array, values: jax.Array, seq: Sequence) -> aft.Sums:
        n_tokens, queries = keys.shape[1], places(seq)
        keys, values = seq.cache(keys, fill=aft.EMPTY), seq.cache(values)
        bias = aft.low_rank_bias(self.position_queries, self.position_keys)
        if not seq.is_online:
            return full_sums(keys, values, bias, queries, queries, seq.position)
        room = keys.shape[1]
        positions = queries.position[:, :1] - seq.position + jnp.arange(room, dtype=jnp.int32)
        seen = aft.Places(positions, jnp.zeros_like(positions))
        sums = full_sums(keys, values, bias, queries, seen, seq.position)
        return sums._replace(weighted=within(sums.weighted, seq.position + n_tokens, room))


class WindowedAFT(AFT):
    """Position biases on the last K tokens; the state is the last K - 1 keys and values, and earlier sums."""

    def sums(self, keys: jax.Array, values: jax.Array, seq: Sequence) -> aft.Sums:
        n_before, own = self.window - 1, places(seq)
        keys = jnp.concatenate([seq.before(keys, n_before, aft.EMPTY), keys], axis=1)
        values = jnp.concatenate([seq.before(values, n_before), values], axis=1)
        earlier = own.position[:, :1] + jnp.arange(-n_before, 0, dtype=jnp.int32)
        seen = aft.Places(
            jnp.concatenate([earlier, own.position], axis=1),
            jnp.pad(own.document, [(0, 0), (n_before, 0)], mode="edge"),
        )

        def run(before: aft.Sums) -> tuple[aft.Sums, aft.Sums]:
            return window_sums(keys, values, self.bias(), before, seen, self.window)

        return seq.carry("sums", lambda: aft.no_sums(keys, values), run)


class AFTLocal(WindowedAFT):
    """AFT-local: w_{t,s} = u_t . v_s where t - s < window, and 0, not minus infinity, beyond.

    Parameters:
      qkv_proj/kernel [D, 3*D]: columns are queries, keys, values, D each.
      qkv_proj/bias [3*D]: likewise.
      position_queries [Lmax, R]: u, by the position of the query.
      position_keys [Lmax, R]: v, by the position of the key.
      out_proj/kernel [D, D]
      out_proj/bias [D]
    """

    config: AFTLocalConfig = AFTLocalConfig()

    def setup(self) -> None:
        super().setup()
        shape = (self.max_len, self.config.rank)
        self.position_queries = self.param("position_queries", position_init, shape, jnp.float32)
        self.position_keys = self.param("position_keys", position_init, shape, jnp.float32)

    @property
    def window(self) -> int:
        """K; no lag is longer than the sequence."""
        return min(self.config.window, self.max_len)

    def bias(self) -> aft.Bias:
        """w."""
        return aft.low_rank_bias(self.position_queries, self.position_keys, self.window)


class AFTConv(WindowedAFT):
    """AFT-conv: one key per head, and w^h_{t,s} = tap t - s of head h, 0 beyond the last of K taps.

    The taps are the parameters, standardised over K, times gamma, plus beta; gamma and beta start as 0.

    Parameters:
      qkv_proj/kernel [D, 2*D + H]: columns are queries, D, one key per head, H, and values, D.
      qkv_proj/bias [2*D + H]: likewise.
      position_taps [H, K]: tap 0 meets the current token.
      position_scale [H]: gamma.
      position_bias [H]: beta.
      out_proj/kernel [D, D]
      out_proj/bias [D]
    """

    config: AFTConvConfig = AFTConvConfig()

    @staticmethod
    def is_unbounded(config: AFTConvConfig) -> bool:
        """Decoding may continue beyond max_len: the state does not grow."""
        return True

    def setup(self) -> None:
        super().setup()
        self.position_taps = self.param(
            "position_taps", position_init, (self.n_heads, self.window), jnp.float32
        )
        self.position_scale = self.param(
            "position_scale", nn.initializers.zeros, (self.n_heads,), jnp.float32
        )
        self.position_bias = self.param("position_bias", nn.initializers.zeros, (self.n_heads,), jnp.float32)

    @property
    def n_heads(self) -> int:
        """H."""
        return self.config.n_heads

    @property
    def key_width(self) -> int:
        """H, with one channel each."""
        return self.config.n_heads

    @property
    def window(self) -> int:
        """K."""
        return self.config.n_taps

    def bias(self) -> aft.Bias:
        """w."""
        taps = aft.standardize_taps(self.position_taps, self.position_scale, self.position_bias)
        return aft.tap_bias(taps)
