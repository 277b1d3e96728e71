"""How long the channels of an RG-LRU remember, and what its gates do.

Axes: B batch, L length, W channels of the recurrence.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from hyena_jax.mixers import Hawk

# What is reported of a channel that never forgets.
LONGEST = 1e6


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
    """-1 / (mean over t of log |a_t|) [B, W], in steps: after so many a state has shrunk by the factor e.

    Args:
      decay: a_t [B, L, W]; 0 shrinks everything at once. At most `LONGEST`.
    """
    rate = -jnp.log(jnp.abs(decay)).mean(axis=1)
    return 1 / jnp.maximum(rate, 1 / LONGEST)
