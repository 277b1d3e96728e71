"""Spectral filters: given by their Fourier transform over Lmax, or as sums of fixed vectors over the lags.

Axes: L length, D channels, N filters; of the STU, K vectors, Q points of a quadrature.
"""

from functools import lru_cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.config import FNOFilterConfig, STUFilterConfig, TransferFunctionFilterConfig
from hyena_jax.filters.long_filter import LongFilter
from hyena_jax.system.errors import require

# Of the STU: the least eigenvalue, relative to the largest, whose vector float64 gives to 1e-7.
LEAST_EIGENVALUE = 1e-18
# Step and ends of the quadrature in ln s, s = -ln(alpha): Z then has relative errors below 1e-13.
STEP, BEFORE, AFTER = 0.2, 14.0, 3.8
# Rows of the factor of Z that are in memory at a time.
ROWS = 2**14


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


class STUFilter(LongFilter):
    """h_t = sum_k phi_kt (M_k + (-1)^t M'_k): spectral filtering (Hazan et al. 2017, arXiv 1711.00946).

    phi_k = sigma_k^(1/4) e_k, of the K largest eigenvalues and eigenvectors of Z_ij = 2 / ((i+j)^3 - (i+j)),
    i, j = 1..Lmax; M' acts on systems with negative eigenvalues (Agarwal et al. 2023, arXiv 2312.06837). The
    mixer `fir` with this filter is the tensordot form of the STU (2409.10489) with one more dense layer. In
    its published code M' is M (`shared`), so that odd lags vanish and even ones are doubled.

    The vectors phi_k are constants, not parameters, and all their entries change with Lmax.

    Parameters:
      weights [N, D, K]: M, the largest eigenvalue first.
      alternating_weights [N, D, K]: M'; only with alternating `separate`.
    """

    config: STUFilterConfig = STUFilterConfig()

    def setup(self) -> None:
        self.config.check(self.max_len)
        n_vectors = self.config.n_vectors
        self.phi = spectral_vectors(self.max_len, n_vectors)
        shape = (self.n_filters, self.d_model, n_vectors)
        # Xavier-normal, as M [K, D] in the published code.
        init = nn.initializers.normal((2 / (n_vectors + self.d_model)) ** 0.5)
        self.weights = self.param("weights", init, shape, jnp.float32)
        if self.config.alternating == "separate":
            self.alternating_weights = self.param("alternating_weights", init, shape, jnp.float32)

    def taps_until(self, length: int) -> jax.Array:
        phi = jnp.asarray(self.phi[:, :length], self.weights.dtype)
        h = jnp.matmul(self.weights, phi, precision="highest")
        if self.config.alternating == "none":
            return h
        second = h
        if self.config.alternating == "separate":
            second = jnp.matmul(self.alternating_weights, phi, precision="highest")
        sign = 1 - 2 * (np.arange(length) % 2)
        return h + jnp.asarray(sign, h.dtype) * second


@lru_cache(maxsize=2)  # for all layers and traces of a model
def spectral_vectors(max_len: int, n_vectors: int) -> np.ndarray:
    """phi float64 [K, Lmax], the largest eigenvalue first; the largest entry of each vector is positive.

    Z is the integral of (1 - alpha)^2 alpha^(i+j-2) over alpha in [0, 1], so a quadrature gives Z = A A^T,
    A [Lmax, Q]. The vectors are computed from A. Computed from Z, the last ones would depend on the LAPACK:
    Z's eigenvalues fall to 1e-16 of the largest, the precision of float64, within 18 vectors (Lmax 64) to 32
    (Lmax 8192). A's singular values are their roots, 1e-8 there, of which float64 keeps half the digits.
    """
    s = np.exp(np.arange(-np.log(2 * max_len) - BEFORE, AFTER, STEP))
    weight = -np.expm1(-s) * np.sqrt(STEP * s * np.exp(-s))

    def rows(first: int) -> np.ndarray:
        i = np.arange(first, min(first + ROWS, max_len))
        return np.exp(-i[:, None] * s) * weight

    starts = range(0, max_len, ROWS)
    r = np.zeros((0, len(s)))
    for first in starts:  # A = (an orthogonal matrix) R
        r = np.linalg.qr(np.concatenate([r, rows(first)]), mode="r")
    _, singular, right = np.linalg.svd(r, full_matrices=False)
    most = int((singular**2 >= LEAST_EIGENVALUE * singular[0] ** 2).sum())
    require(n_vectors <= most, "n_vectors", n_vectors, f"at most {most} with max_len={max_len}")
    # sigma^(1/4) e = s^(1/2) A v / s for the singular value s and the right vector v.
    columns = right[:n_vectors].T / np.sqrt(singular[:n_vectors])
    phi = np.concatenate([rows(first) @ columns for first in starts]).T
    largest = np.take_along_axis(phi, np.abs(phi).argmax(axis=1)[:, None], axis=1)
    return phi * np.sign(largest)
