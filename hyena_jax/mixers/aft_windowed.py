"""The attention-free transformer's mixers with position biases in a window: AFT-local and AFT-conv.

Axes and the operator are those of `hyena_jax.mixers.aft`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import AFTConvConfig, AFTLocalConfig
from hyena_jax.mixers.aft import AFT, Window, position_init
from hyena_jax.ops import aft
from hyena_jax.ops.aft_blocks import window_sums


class WindowedAFT(AFT):
    """Position biases act on the last K tokens; the state is these and the sums over all before them."""

    def _empty(self, keys: jax.Array, values: jax.Array) -> Window:
        def last(x: jax.Array, fill: float) -> jax.Array:
            return jnp.full_like(x, fill, shape=(x.shape[0], self.window - 1, *x.shape[2:]))

        return Window(last(keys, aft.EMPTY), last(values, 0), aft.no_sums(keys, values))

    def _continue(
        self, memory: Window, keys: jax.Array, values: jax.Array, places: aft.Places, position: jax.Array
    ) -> tuple[aft.Sums, Window]:
        kept = self.window - 1
        keys = jnp.concatenate([memory.keys, keys], axis=1)
        values = jnp.concatenate([memory.values, values], axis=1)
        earlier = places.position[:, :1] + jnp.arange(-kept, 0, dtype=jnp.int32)
        seen = aft.Places(
            jnp.concatenate([earlier, places.position], axis=1),
            jnp.pad(places.document, [(0, 0), (kept, 0)], mode="edge"),
        )
        sums, before = window_sums(keys, values, self.bias(), memory.before, seen, self.window)
        start = keys.shape[1] - kept
        return sums, Window(keys[:, start:], values[:, start:], before)


class AFTLocal(WindowedAFT):
    """AFT-local: w_{t,s} = u_t . v_s where t - s < window, and 0, not minus infinity, beyond.

    Attributes:
      d_model: D.
      max_len: Lmax, longest sequence.
      config: see `AFTLocalConfig`.
      n_layers: depth of the residual stack; initialisers of the output projection may depend on it.
      dtype: of the activations; None follows the input. Sums and states stay in float32.

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
        self.position_queries = self.param("position_queries", position_init, shape)
        self.position_keys = self.param("position_keys", position_init, shape)

    @property
    def window(self) -> int:
        """K; no lag is longer than the sequence."""
        return min(self.config.window, self.max_len)

    def bias(self) -> aft.Bias:
        """w."""
        return aft.low_rank_bias(self.position_queries, self.position_keys, self.window)


class AFTConv(WindowedAFT):
    """AFT-conv: one key a head, and w^h_{t,s} = tap t - s of head h, 0 beyond the last of K taps.

    The taps are the parameters, standardised over K, times gamma, plus beta; both are 0 at first.

    Attributes:
      d_model: D.
      max_len: longest sequence.
      config: see `AFTConvConfig`.
      n_layers: depth of the residual stack; initialisers of the output projection may depend on it.
      dtype: of the activations; None follows the input. Sums and states stay in float32.

    Parameters:
      qkv_proj/kernel [D, 2*D + H]: columns are queries, D, one key a head, H, and values, D.
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
        self.position_taps = self.param("position_taps", position_init, (self.n_heads, self.window))
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
