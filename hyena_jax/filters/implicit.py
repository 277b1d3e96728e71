"""Filters as sine networks of the time index. Axes: L length, D channels, N filters, E = emb_dim features."""

from functools import lru_cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.config import CKConvFilterConfig, ImplicitFilterConfig
from hyena_jax.filters.long_filter import LongFilter, decay_rates, l1_normalized, relative_time


class CKConvFilter(LongFilter):
    """h = SineNetwork(PositionalFeatures(t)), without a window (Romero et al. 2021, arXiv 2102.02611).

    Time is relative to `max_len`, never to the current length, so the filter of a short sequence is the
    beginning of the filter of a long one. Always float32 (or float64).

    Parameters:
      positions [Lmax, E]: features of lag t in row t: time, then cosines, then sines, low to high.
      sine_frequency [width]: w in sin(w x), one vector for all layers; a constant unless trained.
      dense_0/kernel [E, width]: from the features.
      dense_0/bias [width]:
      dense_1/kernel [width, width]: one of n_hidden hidden layers, by default two.
      dense_1/bias [width]:
      dense_2/kernel [width, width]:
      dense_2/bias [width]:
      dense_3/kernel [width, N*D]: the last layer; column d*N + o is filter o of channel d.
    """

    config: CKConvFilterConfig | ImplicitFilterConfig = CKConvFilterConfig()

    def setup(self) -> None:
        config = self.config
        self.positions = self.param("positions", lambda _: positional_features(self.max_len, config))
        # One frequency vector serves every layer, as in the published code.
        if config.train_sine_frequency:
            init = nn.initializers.constant(config.sine_frequency)
            self.sine_frequency = self.param("sine_frequency", init, (config.width,), jnp.float32)
        else:
            self.sine_frequency = config.sine_frequency
        init = nn.initializers.normal(0.02)
        self.dense = [
            *(nn.Dense(config.width, kernel_init=init) for _ in range(config.n_hidden + 1)),
            nn.Dense(self.n_filters * self.d_model, use_bias=False, kernel_init=init),
        ]

    def taps_until(self, length: int) -> jax.Array:
        return self._by_filter(self._network(length))

    def _network(self, taps: int) -> jax.Array:
        """Output of the sine network at the first `taps` lags [taps, D N]."""
        hidden = self.positions[:taps]
        for dense in self.dense[:-1]:
            hidden = jnp.sin(self.sine_frequency * dense(hidden))
        return self.dense[-1](hidden)

    def _by_filter(self, h: jax.Array) -> jax.Array:
        return h.reshape(len(h), self.d_model, self.n_filters).transpose(2, 1, 0)


class ImplicitFilter(CKConvFilter):
    """h = window(t) ⊙ SineNetwork(PositionalFeatures(t)) (Poli et al. 2023, section 3.3).

    window(t) = exp(-|decay| t/(Lmax-1)) + shift, with a decay for each of the D N channels.

    Parameters:
      decay [N*D]: exponents of the window, ordered as these columns; a constant unless trained.
    """

    config: ImplicitFilterConfig = ImplicitFilterConfig()

    def setup(self) -> None:
        super().setup()
        self.decay = decay_rates(self.config, self.n_filters * self.d_model)
        if self.config.train_decay:
            initial = jnp.asarray(self.decay, jnp.float32)
            self.decay = self.param("decay", lambda _: initial)

    def taps_until(self, length: int) -> jax.Array:
        # A norm over the lags depends on the whole filter: evaluate all of it, then cut.
        taps = self.max_len if self.config.norm_axis == "length" else length
        h = self._network(taps)
        time = relative_time(taps, self.max_len, h.dtype)
        window = jnp.exp(-time[:, None] * jnp.abs(jnp.asarray(self.decay, h.dtype)))
        h = h * (window + self.config.window_shift)
        h = l1_normalized(h, {"none": None, "channels": 1, "length": 0}[self.config.norm_axis])
        return self._by_filter(h[:length])


def positional_features(max_len: int, config: CKConvFilterConfig | ImplicitFilterConfig) -> jax.Array:
    """[t/(Lmax-1), cos(f w_t), ∓sin(f w_t)] at w_t = 2 pi t / Lmax, float32 [Lmax, E] (appendix A.3).

    In the published code f is linspace(1e-4, bands - 1, bands) and the sine's sign is minus; the annotated
    variant has 0 .. bands - 1 and plus.
    """
    bands = (config.emb_dim - 1) // 2
    lowest, sign = (1e-4, -1) if config.features == "published" else (0, 1)
    return jnp.asarray(_features(max_len, bands, lowest, sign))


@lru_cache(maxsize=1)  # one for all layers and traces of a model: it takes seconds at a million lags
def _features(max_len: int, bands: int, lowest: float, sign: int) -> np.ndarray:
    t = np.arange(max_len)[:, None]
    angle = np.linspace(lowest, bands - 1, bands) * 2 * np.pi * t / max_len
    time = t / max(max_len - 1, 1)
    return np.concatenate([time, np.cos(angle), sign * np.sin(angle)], axis=1).astype(np.float32)
