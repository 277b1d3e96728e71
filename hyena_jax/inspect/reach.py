"""How far back a mixer reaches: its long filters over the lags, and the memory and gates of an RG-LRU.

Axes: B batch, N filters of a mixer, D channels of a filter, L length or lags, k singular values, W channels
of a recurrence.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hyena_jax.mixers import Hawk
from hyena_jax.ops import hankel
from hyena_jax.system.errors import require

# The part of a filter's energy that its effective length holds.
ENERGY = 0.95
# What is reported of a channel that never forgets.
LONGEST = 1e6


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

    k = min(n_values, floor((L - 1) / 2)). Their fall says how large a recurrence with the same filter must
    be: see `hyena_jax.ops.hankel`. h_0 is left out, since any recurrence can have it.
    """
    later = h[..., 1:].reshape(-1, h.shape[-1] - 1)
    values = hankel.spectrum(later, n_values).values[:, :n_values]
    return values.reshape(*h.shape[:-1], -1)


class Gates(NamedTuple):
    """The gates of an RG-LRU over one input, each [B, L, W], float32 at least.

    Attributes:
      recurrence: r_t, in [0, 1]: 0 keeps the state.
      input: i_t, in [0, 1].
      decay: a_t, the factor of the state; with `sign` it may be negative.
    """

    recurrence: jax.Array
    input: jax.Array
    decay: jax.Array


def gates(mixer: nn.Module, params: optax.Params, x: jax.Array) -> Gates | None:
    """The gates of a `Hawk` for its input x [B, L, D]; None for another mixer."""
    if not isinstance(mixer, Hawk):
        return None
    return Gates(*jax.jit(lambda params, x: mixer.apply({"params": params}, x, method="gates"))(params, x))


def memory_lengths(decay: jax.Array) -> jax.Array:
    """-1 / (mean over t of log |a_t|) [B, W], at most `LONGEST`: steps in which a state shrinks e-fold.

    `decay` is a_t [B, L, W]; 0 shrinks everything at once.
    """
    rate = -jnp.log(jnp.abs(decay)).mean(axis=1)
    return 1 / jnp.maximum(rate, 1 / LONGEST)
