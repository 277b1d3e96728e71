"""The implicit filter of Hyena. Axes: L length, D channels, N filters, E = emb_dim features."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.config import ImplicitFilterConfig, require


class ImplicitFilter(nn.Module):
    """h = window(t) ⊙ SineNetwork(PositionalFeatures(t)) (Poli et al. 2023, section 3.3).

    Time is measured against `max_len`, never against the current length, so the filter of a short
    sequence is the beginning of the filter of a long one. Always float32 (or float64).

    Attributes:
      n_filters: N; output channel d N + o of the network is filter o of channel d.
      d_model: D.
      max_len: Lmax.
      config: see `ImplicitFilterConfig`.
    """

    n_filters: int
    d_model: int
    max_len: int
    config: ImplicitFilterConfig = ImplicitFilterConfig()

    def setup(self) -> None:
        config = self.config
        channels = self.n_filters * self.d_model
        self.positions = self.param("positions", lambda _: positional_features(self.max_len, config.emb_dim))
        # One frequency vector serves every layer, as in the published code.
        self.sine_frequency = self.param(
            "sine_frequency", nn.initializers.constant(config.sine_frequency), (config.width,)
        )
        init = nn.initializers.normal(0.02)
        self.dense = [
            *(nn.Dense(config.width, kernel_init=init) for _ in range(config.n_hidden + 1)),
            nn.Dense(channels, use_bias=False, kernel_init=init),
        ]
        decay = decay_rates(config, channels)
        if config.train_decay:
            self.decay = self.param("decay", lambda _: jnp.asarray(decay, jnp.float32))
        else:
            self.decay = decay

    def __call__(self, length: int) -> jax.Array:
        """The first `length` taps, h [N, D, length]."""
        require(1 <= length <= self.max_len, "sequence length", length, f"in 1..max_len={self.max_len}")
        # A norm over the lags is a property of the whole filter: evaluate that, then cut.
        taps = self.max_len if self.config.norm_axis == "length" else length
        hidden = self.positions[:taps]
        for dense in self.dense[:-1]:
            hidden = jnp.sin(self.sine_frequency * dense(hidden))
        h = self.dense[-1](hidden) * self._window(taps, hidden.dtype)  # [taps, D N]
        if self.config.norm_axis != "none":
            axis = {"channels": 1, "length": 0}[self.config.norm_axis]
            h = h / jnp.abs(h).sum(axis, keepdims=True)
        return h[:length].reshape(length, self.d_model, self.n_filters).transpose(2, 1, 0)

    def _window(self, taps: int, dtype: jnp.dtype) -> jax.Array:
        time = jnp.arange(taps, dtype=dtype) / max(self.max_len - 1, 1)
        return jnp.exp(-time[:, None] * jnp.abs(jnp.asarray(self.decay, dtype))) + self.config.window_shift


def positional_features(max_len: int, emb_dim: int) -> jax.Array:
    """[t/(Lmax-1), cos(f w_t), -sin(f w_t)] at w_t = 2 pi t / Lmax, float32 [Lmax, E] (appendix A.3)."""
    bands = (emb_dim - 1) // 2
    t = np.arange(max_len)[:, None]
    angle = np.linspace(1e-4, bands - 1, bands) * 2 * np.pi * t / max_len
    time = t / max(max_len - 1, 1)
    return jnp.asarray(np.concatenate([time, np.cos(angle), -np.sin(angle)], axis=1), jnp.float32)


def decay_rates(config: ImplicitFilterConfig, channels: int) -> np.ndarray:
    """Window exponents, evenly spaced from the slowest channel to the fastest: float64 [channels]."""
    log_target = np.log(config.decay_target)
    return np.linspace(log_target / config.slow_decay, log_target / config.fast_decay, channels)
