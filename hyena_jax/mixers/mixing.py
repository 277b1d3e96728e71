"""What a mixer does along the sequence as matrices, for mixers that are linear in their values.

Axes: B batch, L length, N matrices (heads, or channels), d channels of a matrix's values.

A mixer may offer

    mixing_matrix(x [B, L, D]) -> Mixing | None

None where its options leave no such matrices. `hyena_jax.inspect` draws them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Impulses that an operator answers at a time.
AT_ONCE = 8


class Mixing(NamedTuple):
    """The matrices M of a mixer for one input, and the values v that they mix.

    o_{t,n} = sum_s M^n_{t,s} v_{s,n} is what enters the mixer's output projection, or the activation before
    that. M depends on the input through gates, queries and keys, all of which it includes; v does not
    include them. In a causal mixer M is 0 above its diagonal.

    Attributes:
      matrices: M [B, N, L, L], float32 at least: row t holds what output t takes from each value.
      values: v [B, L, N, d]; the d channels of a head share its matrix.
    """

    matrices: jax.Array
    values: jax.Array

    def outputs(self) -> jax.Array:
        """o [B, L, N, d], float32 at least."""
        values = self.values.astype(self.matrices.dtype)
        return jnp.einsum("bnts,bsnd->btnd", self.matrices, values, precision="highest")


def impulse_responses(
    operator: Callable[[jax.Array], jax.Array], values: jax.Array, axis: int, is_causal: bool
) -> jax.Array:
    """The answer of an operator to 1 at each position and 0 elsewhere: its matrices, column by column.

    Args:
      operator: from values to outputs of the same shape; linear, and no channel or row of the batch sees
        another.
      values: their shape and dtype count.
      axis: of the positions.
      is_causal: write exact zeros above the diagonal, where an FFT leaves rounding errors.

    Returns:
      The shape of `values` without `axis`, then [L, L] (t, s); float32 at least.
    """
    length = values.shape[axis]
    positions = jnp.arange(length, dtype=jnp.int32)
    along = jnp.expand_dims(positions, tuple(i for i in range(values.ndim) if i != axis % values.ndim))

    def answer(s: jax.Array) -> jax.Array:
        impulse = jnp.broadcast_to(along == s, values.shape).astype(values.dtype)
        return jnp.moveaxis(operator(impulse), axis, -1)

    columns = jnp.moveaxis(jax.lax.map(answer, positions, batch_size=AT_ONCE), 0, -1)
    columns = columns.astype(jnp.promote_types(columns.dtype, jnp.float32))
    return jnp.tril(columns) if is_causal else columns
