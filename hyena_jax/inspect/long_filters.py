"""The long filters of a mixer: over the lags, their spectra, lengths and Hankel singular values.

Axes: N filters of a mixer, D channels of a filter, L lags, k singular values.
"""

import flax.linen as nn
import jax
import numpy as np
import optax

from hyena_jax.ops import hankel
from hyena_jax.system.errors import require

# The part of a filter's energy that its effective length holds.
ENERGY = 0.95


def filters(mixer: nn.Module, params: optax.Params, length: int) -> np.ndarray | None:
    """The filters h [N, D, L] of a mixer over the lags 0 .. length - 1, float64; None if it has none.

    A mixer's filter is its submodule `filter`, as for distillation; skips are not part of it. A filter of few
    taps ends with them.
    """
    if not isinstance(getattr(mixer.bind({"params": params}), "filter", None), nn.Module):
        return None
    reach = getattr(getattr(mixer.config, "filter", None), "reach", None)
    n_lags = length if reach is None else min(length, reach)
    h = jax.jit(lambda params: mixer.bind({"params": params}).filter(n_lags))(params)
    return np.asarray(h, np.float64)


def spectrum(h: np.ndarray) -> np.ndarray:
    """Magnitudes [..., L + 1] of the Fourier transform of h [..., L], at frequencies 0 .. 1/2 per step."""
    return np.abs(np.fft.rfft(h, 2 * h.shape[-1]))


def effective_length(h: np.ndarray, energy: float = ENERGY) -> np.ndarray:
    """The least number of lags [...], from 0, that hold this part of sum h^2 of h [..., L]; 0 if h is 0.

    Raises:
      ValueError: if `energy` is not in (0, 1].
    """
    require(0 < energy <= 1, "energy", energy, "in (0, 1]")
    largest = np.abs(h).max(axis=-1, keepdims=True)
    h = h / np.where(largest > 0, largest, 1)
    held = np.cumsum(np.square(h), axis=-1)
    reached = held >= energy * held[..., -1:]
    return np.where(largest[..., 0] > 0, reached.argmax(axis=-1) + 1, 0)


def hankel_values(h: np.ndarray, n_values: int = 64) -> np.ndarray:
    """Singular values [..., k] of the Hankel matrix of h_1, h_2, ... of h [..., L], largest first.

    k = min(n_values, floor((L - 1) / 2)). How fast they fall says how large a recurrence must be that gives
    the same filter: see `hyena_jax.ops.hankel`. h_0 is left out, since any recurrence can have it.
    """
    later = h[..., 1:].reshape(-1, h.shape[-1] - 1)
    values = hankel.spectrum(later, n_values).values[:, :n_values]
    return values.reshape(*h.shape[:-1], -1)
