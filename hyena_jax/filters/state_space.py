"""Filters that are the impulse response of a diagonal recurrence. Axes: L length, D channels, N filters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.config import ModalFilterConfig, RealModalFilterConfig, S4DFilterConfig
from hyena_jax.filters.long_filter import LongFilter
from hyena_jax.ops.modal_conv import Modes, modal_response, modal_taps


class S4DFilter(LongFilter):
    """h_t = 2 Re sum_n C_n Abar_n^t Bbar_n, a bilinear discretisation (Gu et al. 2022, arXiv 2206.11893).

    A_n = -exp(log_decay) + i frequency, Abar = (1 + dt A/2) / (1 - dt A/2), Bbar = dt B / (1 - dt A/2). Only
    one mode of each conjugate pair is stored, hence the 2 Re.

    Parameters:
      log_decay [N, D, n_state//2]: A's real part is -exp(log_decay).
      frequency [N, D, n_state//2]: A's imaginary part, in radians per unit of continuous time.
      log_dt [N, D]: logarithm of the time between tokens.
      b [N, D, n_state//2, 2]: real and imaginary part of B.
      c [N, D, n_state//2, 2]: real and imaginary part of C.
    """

    config: S4DFilterConfig = S4DFilterConfig()

    def setup(self) -> None:
        config = self.config
        shape = (self.n_filters, self.d_model)
        modes = (*shape, config.n_state // 2)
        constant = nn.initializers.constant
        self.log_decay = self.param("log_decay", constant(np.log(0.5)), modes, jnp.float32)
        frequencies = jnp.broadcast_to(jnp.asarray(initial_frequencies(config), jnp.float32), modes)
        self.frequency = self.param("frequency", lambda _: frequencies)
        self.log_dt = self.param("log_dt", _log_uniform(config.dt_min, config.dt_max), shape)
        one = jnp.broadcast_to(jnp.array([1.0, 0.0], jnp.float32), (*modes, 2))
        self.b = self.param("b", lambda _: one)
        self.c = self.param("c", nn.initializers.normal(0.5**0.5), (*modes, 2), jnp.float32)

    def taps_until(self, length: int) -> jax.Array:
        return 2 * modal_response(*self._modes(), length)

    def recurrence(self) -> Modes:
        log_modes, weights = self._modes()
        return Modes(log_modes, 2 * weights * jnp.exp(log_modes), 2 * weights.real.sum(-1))

    def _modes(self) -> tuple[jax.Array, jax.Array]:
        """Logarithms of Abar, and C Bbar."""
        dt = jnp.exp(self.log_dt)[..., None]
        half_step = jax.lax.complex(-jnp.exp(self.log_decay) * dt / 2, self.frequency * dt / 2)
        a_bar = (1 + half_step) / (1 - half_step)
        b_bar = _as_complex(dt[..., None] * self.b) / (1 - half_step)
        a_bar = jnp.where(a_bar == 0, 1e-30, a_bar)  # whose logarithm would be infinite
        return jnp.log(a_bar), _as_complex(self.c) * b_bar


class ModalFilter(LongFilter):
    """h_0 free, h_t = Re sum_n R_n lambda_n^(t-1) with |lambda_n| < 1 (Massaroli et al. 2023, 2310.18780).

    lambda = exp(-exp(log_decay) + i angle).

    Parameters:
      log_decay [N, D, n_modes]: ln(-ln |lambda|).
      angle [N, D, n_modes]: argument of lambda, radians per token.
      residue [N, D, n_modes, 2]: real and imaginary part of R.
      lag_zero [N, D]: weight of the current input.
    """

    config: ModalFilterConfig = ModalFilterConfig()

    def setup(self) -> None:
        config = self.config
        shape = (self.n_filters, self.d_model)
        modes = (*shape, config.n_modes)
        slowest, fastest = -np.log(config.max_radius), -np.log(config.min_radius)
        self.log_decay = self.param("log_decay", _log_uniform(slowest, fastest), modes)
        self.angle = self.param("angle", nn.initializers.uniform(np.pi), modes, jnp.float32)
        # At initialisation every mode's response has the same energy, however slowly it decays.
        energy = -jnp.expm1(-2 * jnp.exp(self.log_decay))[..., None]
        residue = nn.initializers.normal((0.5 / config.n_modes) ** 0.5)
        size, dtype = (*modes, 2), energy.dtype
        self.residue = self.param("residue", lambda key: residue(key, size, dtype) * energy**0.5)
        self.lag_zero = self.param("lag_zero", nn.initializers.normal(1.0), shape, jnp.float32)

    def taps_until(self, length: int) -> jax.Array:
        return modal_taps(self.recurrence(), length)

    def recurrence(self) -> Modes:
        log_modes = jax.lax.complex(-jnp.exp(self.log_decay), self.angle)
        return Modes(log_modes, _as_complex(self.residue), self.lag_zero)


class RealModalFilter(LongFilter):
    """h_t = sum_n R_n e^(-r_n t) with r = exp(log_rate) > 0: the long convolutions of StripedHyena 2.

    Their released weights store the pole -r as `log_poles` (Ku et al. 2025, arXiv 2503.01868).

    Parameters:
      log_rate [N, D, n_modes]: ln r, r the rate of decay per token.
      residue [N, D, n_modes]: R.
    """

    config: RealModalFilterConfig = RealModalFilterConfig()

    def setup(self) -> None:
        config = self.config
        shape = (self.n_filters, self.d_model, config.n_modes)

        def log_rate(key: jax.Array) -> jax.Array:
            return jnp.log(jax.random.uniform(key, shape, jnp.float32, config.min_rate, config.max_rate))

        self.log_rate = self.param("log_rate", log_rate)
        self.residue = self.param(
            "residue", nn.initializers.normal(0.1 * config.n_modes**-0.5), shape, jnp.float32
        )

    def taps_until(self, length: int) -> jax.Array:
        return modal_response(-jnp.exp(self.log_rate), self.residue, length)

    def recurrence(self) -> Modes:
        log_modes = -jnp.exp(self.log_rate)
        return Modes(log_modes, self.residue * jnp.exp(log_modes), self.residue.sum(-1))


def initial_frequencies(config: S4DFilterConfig) -> np.ndarray:
    """S4D-Lin or S4D-Inv, float64 [n_state / 2] (arXiv 2206.11893, equations 8 and 9)."""
    n = np.arange(config.n_state // 2)
    if config.init == "lin":
        return np.pi * n
    return config.n_state / np.pi * (config.n_state / (2 * n + 1) - 1)


def _as_complex(parts: jax.Array) -> jax.Array:
    return jax.lax.complex(parts[..., 0], parts[..., 1])


def _log_uniform(low: float, high: float) -> nn.initializers.Initializer:
    """Logarithms of values whose logarithm is uniform between low and high."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, np.log(low), np.log(high))

    return init
