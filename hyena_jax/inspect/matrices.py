"""The matrices by which a mixer mixes along the sequence, for one input.

Axes: B batch, L length, D channels, N matrices (heads, or channels).
"""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from hyena_jax.mixers.mixing import Mixing, mixing_matrices
from hyena_jax.mixers.sequence import Handed
from hyena_jax.system.errors import require

# Gradients that are computed at a time.
GRADIENTS = 16


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
