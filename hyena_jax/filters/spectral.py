"""Filters given by their Fourier transform over Lmax. Axes: L length, D channels, N filters."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import FNOFilterConfig, TransferFunctionFilterConfig
from hyena_jax.filters.long_filter import LongFilter


class FNOFilter(LongFilter):
    """h = irfft(modes) over Lmax points: the lowest M modes are learned, the others 0 (arXiv 2010.08895).

    Always evaluated at Lmax and cut.

    Parameters:
      modes [N, D, M, 2]: mode 0 first; real and imaginary part last.
    """

    config: FNOFilterConfig = FNOFilterConfig()

    def setup(self) -> None:
        n_modes = min(self.config.n_modes, self.max_len // 2 + 1)
        shape = (self.n_filters, self.d_model, n_modes, 2)
        self.modes = self.param("modes", nn.initializers.normal(1.0), shape, jnp.float32)

    def taps_until(self, length: int) -> jax.Array:
        modes = jax.lax.complex(self.modes[..., 0], self.modes[..., 1])
        return jnp.fft.irfft(modes, self.max_len)[..., :length]


class TransferFunctionFilter(LongFilter):
    """h = irfft(rfft([0, b_1..b_n]) / rfft([1, a_1..a_n])) + lag_zero δ, all over Lmax points.

    Always evaluated at Lmax and cut. A response longer than Lmax is aliased: h_t is the sum of the true
    response at t, t + Lmax, t + 2 Lmax, ...

    Parameters:
      numerator [N, D, n_state]: b_1 .. b_n, weights of the inputs 1 to n steps ago.
      denominator [N, D, n_state]: a_1 .. a_n; output t subtracts a_k times output t - k.
      lag_zero [N, D]: weight of the current input.
    """

    config: TransferFunctionFilterConfig = TransferFunctionFilterConfig()

    def setup(self) -> None:
        self.config.check(self.max_len)
        shape = (self.n_filters, self.d_model)
        zeros = nn.initializers.zeros
        self.numerator = self.param("numerator", zeros, (*shape, self.config.n_state), jnp.float32)
        self.denominator = self.param("denominator", zeros, (*shape, self.config.n_state), jnp.float32)
        self.lag_zero = self.param("lag_zero", nn.initializers.normal(1.0), shape, jnp.float32)

    def taps_until(self, length: int) -> jax.Array:
        ratio = self._spectrum(0.0, self.numerator) / self._spectrum(1.0, self.denominator)
        h = jnp.fft.irfft(ratio, self.max_len)[..., :length]
        return h.at[..., 0].add(self.lag_zero)

    def _spectrum(self, first: float, rest: jax.Array) -> jax.Array:
        """DFT of (first, rest_1, .., rest_n) over Lmax points."""
        coefficients = jnp.pad(rest, [(0, 0), (0, 0), (1, 0)], constant_values=first)
        return jnp.fft.rfft(coefficients, self.max_len)
