"""Filters as small networks of the time index.

Axes: L length, D channels, N filters, E = emb_dim features, F rows of a table.
"""

from functools import lru_cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.config import CKConvFilterConfig, ImplicitFilterConfig, LookupFilterConfig, SirenFilterConfig
from hyena_jax.filters.long_filter import LongFilter, decay_rates, l1_normalized, relative_time
from hyena_jax.ops.initializers import uniform_fan_in, uniform_within


class CKConvFilter(LongFilter):
    """h = SineNetwork(PositionalFeatures(t)), without a window (Romero et al. 2021, arXiv 2102.02611).

    Time is relative to `max_len`, never to the current length. Always float32 (or float64).

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


class SirenFilter(LongFilter):
    """h = exp(-decay_d t/(Lmax-1)) ⊙ W sin(dense(... sin(w dense(s)))), at s = 2t/(Lmax-1) - 1.

    The filter of irhum/hyena: a SIREN (Sitzmann et al. 2020, arXiv 2006.09661) whose only input is time, from
    -1 to 1 over Lmax. The window's decays are constants, one for each channel, shared by its filters. Kernels
    are uniform, within 1/sqrt(inputs) in the first layer, sqrt(6/inputs) in the hidden ones and
    sqrt(0.12/inputs) in the last; biases start at 0.

    Parameters:
      dense_0/kernel [1, width]: from time.
      dense_0/bias [width]:
      dense_1/kernel [width, width]: one of n_hidden hidden layers, by default four.
      dense_1/bias [width]:
      dense_2/kernel [width, width]:
      dense_2/bias [width]:
      dense_3/kernel [width, width]:
      dense_3/bias [width]:
      dense_4/kernel [width, width]:
      dense_4/bias [width]:
      dense_5/kernel [width, N*D]: the last layer; column d*N + o is filter o of channel d.
    """

    config: SirenFilterConfig = SirenFilterConfig()

    def setup(self) -> None:
        width = self.config.width
        hidden, last = (uniform_within((scale / width) ** 0.5) for scale in (6, 0.12))
        self.dense = [
            nn.Dense(width, kernel_init=uniform_fan_in(1)),
            *(nn.Dense(width, kernel_init=hidden) for _ in range(self.config.n_hidden)),
            nn.Dense(self.n_filters * self.d_model, use_bias=False, kernel_init=last),
        ]

    def taps_until(self, length: int) -> jax.Array:
        leaves = jax.tree.leaves(self.variables)  # none while they are initialised
        time = relative_time(length, self.max_len, leaves[0].dtype if leaves else jnp.float32)[:, None]
        hidden = jnp.sin(self.config.frequency * self.dense[0](2 * time - 1))
        for dense in self.dense[1:-1]:
            hidden = jnp.sin(dense(hidden))
        h = self.dense[-1](hidden).reshape(length, self.d_model, self.n_filters)
        decay = jnp.asarray(decay_rates(self.config, self.d_model), h.dtype)
        return (h * jnp.exp(time * decay)[..., None]).transpose(2, 1, 0)


class LookupFilter(LongFilter):
    """h(t) = dense(GELU(dense(table(t)))), a learned table over time and a small network; GELU by erf.

    The filter of the gated variant of Hyena.

    Parameters:
      table [width, Lmax]: column t holds the features of lag t.
      dense_0/kernel [width, D]:
      dense_0/bias [D]:
      dense_1/kernel [D, N*D]: column d*N + o is filter o of channel d.
      dense_1/bias [N*D]:
    """

    config: LookupFilterConfig = LookupFilterConfig()

    def setup(self) -> None:
        width = self.config.width
        self.table = self.param("table", nn.initializers.normal(1.0), (width, self.max_len), jnp.float32)
        self.dense = [_dense(self.d_model, width), _dense(self.n_filters * self.d_model, self.d_model)]

    def taps_until(self, length: int) -> jax.Array:
        hidden = nn.gelu(self.dense[0](self.table[:, :length].T), approximate=False)
        h = self.dense[1](hidden)
        return h.reshape(length, self.d_model, self.n_filters).transpose(2, 1, 0)


def _dense(features: int, fan_in: int) -> nn.Dense:
    init = uniform_fan_in(fan_in)
    return nn.Dense(features, kernel_init=init, bias_init=init)


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
