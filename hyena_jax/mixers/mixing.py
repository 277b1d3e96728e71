"""What a mixer does along the sequence as matrices, for mixers that are linear in their values.

Such a mixer marks two places in `mix`, and computes the same with and without the marks:

    v = seq.values(v, "BTHd")    the values that the matrices mix
    o = seq.mixed(o, "BTHd")     what they are mixed to: what enters the output projection, or the norm or
                                 activation before it

The letters name the axes: B batch, T tokens, d channels that share a matrix; all others together are the N
matrices (heads, or channels). Gates, queries and keys are computed before the first mark: after it they would
see the impulse that takes the place of the values. A mixer that is nonlinear in them has no marks.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.parallel import Parallel
from hyena_jax.mixers.sequence import Handed

AT_ONCE = 8
"""Impulses that a mixer answers at a time."""


class Mixing(NamedTuple):
    """The matrices M of a mixer for one input, and the values v that they mix.

    o_{t,n} = sum_s M^n_{t,s} v_{s,n}. All gates, queries and keys are in M, none in v. In a causal mixer M is
    0 above its diagonal.

    Attributes:
      matrices: M [B, N, L, L], float32 at least: row t holds what output t takes from each value.
      values: v [B, L, N, d]; heads that share values have the same ones.
    """

    matrices: jax.Array
    values: jax.Array

    def outputs(self) -> jax.Array:
        """o [B, L, N, d], float32 at least."""
        values = self.values.astype(self.matrices.dtype)
        return jnp.einsum("bnts,bsnd->btnd", self.matrices, values, precision="highest")


class Probe(Parallel):
    """Keeps the marked arrays as [B, L, N, d]; with an impulse s, the values are 1 at s and 0 elsewhere."""

    def __init__(
        self, shape: tuple[int, int], impulse: jax.Array | None = None, handed: Handed | None = None
    ):
        """Rows of `shape`, B and L."""
        super().__init__(shape, handed=None if handed is None else dict(handed))
        self.impulse, self.v, self.o = impulse, None, None

    def values(self, v: jax.Array, axes: str) -> jax.Array:
        self.v = _by_matrix(v, axes)
        if self.impulse is None:
            return v
        others = [i for i, axis in enumerate(axes) if axis != "T"]
        return jnp.broadcast_to(jnp.expand_dims(self.index == self.impulse, others), v.shape).astype(v.dtype)

    def mixed(self, o: jax.Array, axes: str) -> jax.Array:
        self.o = _by_matrix(o, axes)
        return o


def mixing_matrices(
    mixer: nn.Module, params: optax.Params, x: jax.Array, handed: Handed | None = None
) -> Mixing | None:
    """The matrices of a mixer for its input x [B, L, D]; None for one that marks no values.

    Column s of all matrices is the mixer's answer to an impulse at position s, since no matrix sees the
    values of another. Arguments as of `hyena_jax.inspect.mixing`.
    """
    if not isinstance(mixer, Mixer):
        return None

    def probe(x: jax.Array, impulse: jax.Array | None = None) -> tuple[jax.Array | None, jax.Array | None]:
        seq = Probe(x.shape[:2], impulse, handed)
        mixer.apply({"params": params}, x, seq, True, method="mix")
        return seq.v, seq.o

    v, o = probe(x)
    if v is None or o is None:
        return None

    def column(s: jax.Array) -> jax.Array:
        return probe(x, s)[1][..., 0]

    columns = jax.lax.map(column, jnp.arange(x.shape[1], dtype=jnp.int32), batch_size=AT_ONCE)  # [s, B, t, N]
    matrices = jnp.moveaxis(columns, (0, 2), (3, 2))
    matrices = matrices.astype(jnp.promote_types(matrices.dtype, jnp.float32))
    if mixer.config.causal:  # exact zeros above the diagonal, where an FFT leaves rounding errors
        matrices = jnp.tril(matrices)
    return Mixing(matrices, jnp.repeat(v, o.shape[2] // v.shape[2], axis=2))


def _by_matrix(x: jax.Array, axes: str) -> jax.Array:
    """x, with the axes that the letters name, as [B, L, N, d]."""
    matrices = axes.translate(str.maketrans("", "", "BTd"))
    x = x.transpose([axes.index(axis) for axis in "BT" + matrices + "d" * axes.count("d")])
    width = x.shape[-1] if "d" in axes else 1
    return x.reshape(*x.shape[:2], -1, width)
