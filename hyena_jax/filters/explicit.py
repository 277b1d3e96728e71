"""Filters with a learned number at every lag. Axes: L length, D channels, N filters, M taps."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.config import ExplicitFilterConfig, ShortFilterConfig, WindowedFilterConfig
from hyena_jax.filters.long_filter import LongFilter, decay_rates, l1_normalized, relative_time
from hyena_jax.ops.initializers import uniform_fan_in


class ExplicitFilter(LongFilter):
    """h_t = taps_t for t < M, and 0 for t >= M.

    Parameters:
      taps [N, D, M]: tap t is the weight of the input t steps ago.
    """

    config: ExplicitFilterConfig = ExplicitFilterConfig()

    def setup(self) -> None:
        self.config.check(self.max_len)
        n_taps = self.config.n_taps or self.max_len
        # At initialisation, outputs have the variance of the inputs.
        init = nn.initializers.normal(n_taps**-0.5)
        self.taps = self.param("taps", init, (self.n_filters, self.d_model, n_taps), jnp.float32)

    def taps_until(self, length: int) -> jax.Array:
        h = self.taps[..., :length]
        return jnp.pad(h, [(0, 0), (0, 0), (0, length - h.shape[-1])])


class ShortFilter(LongFilter):
    """h_t = taps_t exp(-r t/(Lmax-1)) for t < M, and 0 for t >= M; the window only with `decay`.

    Of D channels, channel c has the rate r = slow (fast / slow)^(c / (D-1)). With a window it is the filter
    of StripedHyena 2's medium convolutions (Ku et al. 2025, arXiv 2503.01868), whose released weights hold
    the product.

    Parameters:
      taps [N, D, M]: tap t is the weight of the input t steps ago, before the window.
    """

    config: ShortFilterConfig = ShortFilterConfig()

    def setup(self) -> None:
        self.config.check(self.max_len)
        n_taps, deviation = self.config.n_taps, self.config.deviation
        init = uniform_fan_in(n_taps) if deviation is None else nn.initializers.normal(deviation)
        self.taps = self.param("taps", init, (self.n_filters, self.d_model, n_taps), jnp.float32)

    def taps_until(self, length: int) -> jax.Array:
        h = self.taps[..., :length]
        if self.config.decay is not None:
            rates = np.geomspace(*self.config.decay, self.d_model)[:, None]
            time = relative_time(h.shape[-1], self.max_len, h.dtype)
            h = h * jnp.exp(-jnp.asarray(rates, h.dtype) * time)
        return jnp.pad(h, [(0, 0), (0, 0), (0, length - h.shape[-1])])


class WindowedFilter(LongFilter):
    """h = taps ⊙ (exp(decay t/(Lmax-1)) + shift), then divided by its L1 norm.

    The filter of the annotated variant of Hyena. Its text takes the norm over the lags, its code over the
    channels; `norm_axis` chooses, by default the channels.

    Parameters:
      taps [N, D, Lmax]: tap t is the weight of the input t steps ago, before the window.
      decay [D]: exponents, negative at the start, shared by the N filters; a constant unless trained.
      shift [D]: the limit of the window; a constant unless trained.
    """

    config: WindowedFilterConfig = WindowedFilterConfig()

    def setup(self) -> None:
        config, channels = self.config, self.d_model
        self.taps = self.param(
            "taps", nn.initializers.normal(1.0), (self.n_filters, channels, self.max_len), jnp.float32
        )
        self.decay = decay_rates(config, channels)
        self.shift = np.full(channels, config.window_shift)
        if config.train_decay:
            decay = jnp.asarray(self.decay, jnp.float32)
            self.decay = self.param("decay", lambda _: decay)
        if config.train_shift:
            shift = jnp.asarray(self.shift, jnp.float32)
            self.shift = self.param("shift", lambda _: shift)

    def taps_until(self, length: int) -> jax.Array:
        # A norm over the lags depends on the whole filter: evaluate all of it, then cut.
        taps = self.max_len if self.config.norm_axis == "length" else length
        dtype = self.taps.dtype
        decay, shift = (jnp.asarray(x, dtype)[:, None] for x in (self.decay, self.shift))
        window = jnp.exp(decay * relative_time(taps, self.max_len, dtype)) + shift
        axis = {"none": None, "channels": 1, "length": 2}[self.config.norm_axis]
        return l1_normalized(self.taps[..., :taps] * window, axis)[..., :length]
