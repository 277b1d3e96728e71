"""The base class of the filters, and what they share: time, the decaying window, the norm.

Axes: L length, D channels, N filters.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.config import FilterConfig, ImplicitFilterConfig, SirenFilterConfig, WindowedFilterConfig
from hyena_jax.system.errors import require

# Least norm to divide by, as a window may leave a filter all zeros; the gradient divides by its square.
LEAST_NORM = 1e-18


class LongFilter(nn.Module):
    """A filter: N = n_filters, D = d_model, Lmax = max_len.

    A subclass adds the default of `config`, its parameters, and `taps_until`.
    """

    n_filters: int
    d_model: int
    max_len: int
    config: FilterConfig

    def __call__(self, length: int) -> jax.Array:
        """The first `length` taps, h [N, D, length]; raises UserError unless 1 <= length <= max_len."""
        require(1 <= length <= self.max_len, "sequence length", length, f"in 1..max_len={self.max_len}")
        return self.taps_until(length)

    def taps_until(self, length: int) -> jax.Array:
        """h [N, D, length], for a length that fits."""
        raise NotImplementedError


def relative_time(taps: int, max_len: int, dtype: jnp.dtype) -> jax.Array:
    """t/(Lmax-1) for the first `taps` lags [taps]: 0 at lag 0, 1 at the last lag of the longest filter."""
    return jnp.arange(taps, dtype=dtype) / max(max_len - 1, 1)


def decay_rates(
    config: ImplicitFilterConfig | SirenFilterConfig | WindowedFilterConfig, channels: int
) -> np.ndarray:
    """Window exponents, evenly spaced from the slowest channel to the fastest: float64 [channels], < 0."""
    log_target = np.log(config.decay_target)
    return np.linspace(log_target / config.slow_decay, log_target / config.fast_decay, channels)


def l1_normalized(h: jax.Array, axis: int | None) -> jax.Array:
    """h divided by its L1 norm along `axis`; None leaves h as it is. Zeros stay zeros."""
    return h if axis is None else h / jnp.maximum(jnp.abs(h).sum(axis, keepdims=True), LEAST_NORM)
