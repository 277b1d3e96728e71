"""What a mixer does, as arrays: the matrices by which it mixes, its long filters, its memory and gates.

Axes: B batch, L length or lags, N matrices (heads, or channels) or filters of a mixer, D channels, k singular
values, W channels of a recurrence.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hyena_jax.mixers import Hawk
from hyena_jax.mixers.mixing import Mixing, mixing_matrices
from hyena_jax.mixers.sequence import Handed
from hyena_jax.ops import hankel
from hyena_jax.system.errors import require

# Gradients that are computed at a time.
GRADIENTS = 16
# The part of a filter's energy that its effective length holds.
ENERGY = 0.95
# What is reported of a channel that never forgets.
LONGEST = 1e6


@partial(jax.jit, static_argnames="mixer")
def mixing(
    mixer: nn.Module, params: optax.Params, x: jax.Array, handed: Handed | None = None
) -> Mixing | None:
    """The matrices M [B, N, L, L] of a mixer for its input x [B, L, D], and the values that they mix.

    M v is what enters the mixer's output projection, gates included: see `hyena_jax.mixers.mixing`. None for
    a mixer without such matrices; `jacobian_norms` then says as much as can be said.

    Args:
      mixer: an unbound module, such as `trace` returns.
      params: the mixer's own parameters.
      handed: what earlier layers hand on to it; None for a first layer.
    """
    return mixing_matrices(mixer, params, x, handed)


def strength(matrices: jax.Array) -> jax.Array:
    """The root mean square [B, L, L] over the N matrices [B, N, L, L]."""
    return jnp.sqrt(jnp.square(matrices).mean(axis=1))


def jacobian_norms(
    function: Callable[[jax.Array], jax.Array], x: jax.Array, n_probes: int | None = None, seed: int = 0
) -> jax.Array:
    """How much output t of a function of x [1, L, D] depends on input s: [L, L] of the block norms.

    Entry (t, s) is the Frobenius norm of the block dy_t / dx_s [D, D]. Unlike a mixing matrix it also sees
    how the gates depend on the input. By reverse mode, since the kernels of `ops.linear_recurrence` on GPUs
    and TPUs refuse forward mode.

    Args:
      function: y [1, L, ...] of x [1, L, D].
      n_probes: None computes the gradient of each single output and is exact. A number computes gradients
        along so many random directions (by `seed`) of each position's output: the squares of the norms are
        then unbiased estimates, better for blocks of higher rank.

    Raises:
      ValueError: if x is not [1, L, D], or n_probes is below 1.
    """
    require(x.ndim == 3 and x.shape[0] == 1, "x", x.shape, "[1, L, D]")
    require(n_probes is None or n_probes >= 1, "n_probes", n_probes, "at least 1, or None")
    length = x.shape[1]

    @jax.jit
    def norms(x: jax.Array) -> jax.Array:
        y, pull_back = jax.vjp(lambda x: function(x).reshape(length, -1), x)
        if n_probes is None:
            directions = jnp.eye(y.shape[1], dtype=y.dtype)
        else:
            shape = (n_probes, y.shape[1])
            directions = jax.random.normal(jax.random.key(seed), shape, y.dtype) / n_probes**0.5

        def pull(index: jax.Array) -> jax.Array:
            """Squared gradients along a direction of one y_t, summed over the input's channels [L]."""
            at = jnp.zeros_like(y).at[index // len(directions)].set(directions[index % len(directions)])
            x_bar = pull_back(at)[0][0].astype(jnp.promote_types(x.dtype, jnp.float32))
            return jnp.square(x_bar).sum(-1)

        squares = jax.lax.map(pull, jnp.arange(length * len(directions)), batch_size=GRADIENTS)
        return jnp.sqrt(squares.reshape(length, len(directions), length).sum(1))

    return norms(x)


def plain_attention(x: jax.Array, is_causal: bool = True) -> jax.Array:
    """softmax(x_t . x_s / sqrt(D)) [B, L, L]: attention without parameters, to compare a mixer with.

    Queries and keys are the mixer's input x [B, L, D] itself, standardised over its channels.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    x = jax.nn.standardize(x, axis=-1, epsilon=1e-5)
    logits = jnp.einsum("btd,bsd->bts", x, x) / x.shape[-1] ** 0.5
    if is_causal:
        logits = jnp.where(jnp.tri(x.shape[1], dtype=bool), logits, -jnp.inf)
    return jax.nn.softmax(logits, axis=-1)


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
    if h.shape[-1] < 3:
        return np.zeros((*h.shape[:-1], 0), h.dtype)
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
