"""Fastmax attention (Gerami et al. 2024, arXiv 2402.07901): a polynomial in place of the exponential.

    o_t = sum_s f(q_t . k_s) v_s / sum_s f(q_t . k_s),    f(x) = sum_{l=0..p} x^l / l!

Axes: B batch, T queries, S keys, L either where T = S, C chunk, H heads, d head_dim, M features. q, k, v are
[B, L, H, d]; a scale of q . k is the caller's to apply. All is float32 (float64 stays).

f(q . k) is a product of features of q and of k alone, so that sums over keys can be taken first: O(L M d),
M = C(d+p, p), in place of O(L^2 d). For even p every weight is positive, at least 1/2 for p = 2. For odd p
weights may be negative and a row's sum of weights may come near 0 or change sign; `guarded` keeps it off 0.
"""

from itertools import combinations_with_replacement
from math import comb, factorial, prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

STANDARDIZE_EPS = 1e-5
"""Added to the variance of a query's or key's channels."""

LEAST_WEIGHT = 1e-3
"""The least magnitude of a row's sum of weights. Even p never comes near it."""

CHUNK = 256
"""Tokens whose features [B, C, H, M] exist at a time."""


class Sums(NamedTuple):
    """Over keys: features ⊗ values [B, H, M, d], and features [B, H, M]."""

    values: jax.Array
    weights: jax.Array


def standardize(x: jax.Array) -> jax.Array:
    """Each token's x [..., d] with mean 0 and variance 1 over its own channels: no token sees another."""
    deviation = jnp.sqrt(x.var(axis=-1, keepdims=True) + STANDARDIZE_EPS)
    return (x - x.mean(axis=-1, keepdims=True)) / deviation


def kernel(x: jax.Array, p: int) -> jax.Array:
    """f(x), by Horner's rule."""
    f = jnp.ones_like(x)
    for degree in range(p, 0, -1):
        f = 1 + f * x / degree
    return f


def features(x: jax.Array, p: int) -> jax.Array:
    """phi(x) [..., M] of x [..., d] with phi(q) . phi(k) = f(q . k) exactly.

    One feature x^alpha / sqrt(alpha!) for each multi-index alpha of degree at most p, by degree and then in
    lexicographic order: for p = 2, 1, all x_i, and x_i x_j for i <= j, those with i = j over sqrt(2).
    """
    width = x.shape[-1]
    monomials, parts = jnp.ones_like(x[..., :1]), [jnp.ones_like(x[..., :1])]
    for degree in range(1, p + 1):
        # x_i times the monomials of the degree below in x_i .. x_{d-1}: in lexicographic order the last ones.
        counts = [comb(width - i + degree - 2, degree - 1) for i in range(width)]
        ends = [monomials[..., monomials.shape[-1] - n :] for n in counts]
        monomials = jnp.concatenate([x[..., i : i + 1] * end for i, end in enumerate(ends)], axis=-1)
        parts.append(monomials * jnp.asarray(_coefficients(width, degree), x.dtype))
    return jnp.concatenate(parts, axis=-1)


def _coefficients(width: int, degree: int) -> np.ndarray:
    """1 / sqrt(alpha!) of each multi-index of this degree, in lexicographic order of its factors."""
    alphas = combinations_with_replacement(range(width), degree)
    return np.array([prod(factorial(alpha.count(i)) for i in set(alpha)) for alpha in alphas]) ** -0.5


def guarded(weights: jax.Array) -> jax.Array:
    """Sums of weights with magnitude at least LEAST_WEIGHT and their own sign, that of 0 being positive.

    Where it acts, the derivative with respect to the sum is 0.
    """
    least = jnp.where(weights < 0, -LEAST_WEIGHT, LEAST_WEIGHT).astype(weights.dtype)
    return jnp.where(jnp.abs(weights) < LEAST_WEIGHT, least, weights)


def fastmax_quadratic(
    q: jax.Array, k: jax.Array, v: jax.Array, p: int, mask: jax.Array | None = None
) -> jax.Array:
    """o [B, T, H, d], by all weights [B, H, T, S]; `mask` broadcasts to them, True where a key is seen."""
    f = kernel(jnp.einsum("bthd,bshd->bhts", q, k), p)
    if mask is not None:
        f = jnp.where(mask, f, 0)
    return _divide(jnp.einsum("bhts,bshd->bthd", f, v), f.sum(axis=-1))


def fastmax_bidirectional(q: jax.Array, k: jax.Array, v: jax.Array, p: int) -> jax.Array:
    """o [B, T, H, d] over all keys, by their sums."""
    real = jnp.ones((1, k.shape[1]), bool)
    size = min(CHUNK, k.shape[1])
    keys = _chunks(k, size), _chunks(v, size), _chunks(real, size)
    sums = jax.lax.scan(
        jax.checkpoint(lambda sums, chunk: (_add_keys(sums, *chunk, p), None)), no_sums(k, p), keys
    )[0]
    o = jax.lax.map(
        jax.checkpoint(lambda q: _divide(*_from_sums(q, sums, p))), _chunks(q, min(CHUNK, q.shape[1]))
    )
    return _join_chunks(o, q.shape[1])


def fastmax_causal(
    q: jax.Array, k: jax.Array, v: jax.Array, p: int, before: Sums, real: jax.Array | None = None
) -> tuple[jax.Array, Sums]:
    """o [B, L, H, d] over the keys up to each query, and the sums after them.

    Chunk by chunk: the weights inside a chunk directly, all earlier keys by their sums. A chunk's features
    are recomputed for the derivative, for which the sums before each chunk are kept.

    Args:
      before: the sums over earlier keys; `no_sums` at the start.
      real: bool [B, L], False for keys that count nothing; None where all do.
    """
    if real is None:
        real = jnp.ones((1, k.shape[1]), bool)
    size = min(CHUNK, k.shape[1])
    causal = jnp.tril(jnp.ones((size, size), bool))

    @jax.checkpoint
    def of_chunk(sums: Sums, chunk: tuple[jax.Array, ...]) -> tuple[Sums, jax.Array]:
        q, k, v, real = chunk
        f = jnp.where(causal & real[:, None, None], kernel(jnp.einsum("bthd,bshd->bhts", q, k), p), 0)
        earlier, earlier_weights = _from_sums(q, sums, p)
        o = _divide(earlier + jnp.einsum("bhts,bshd->bthd", f, v), earlier_weights + f.sum(axis=-1))
        return _add_keys(sums, k, v, real, p), o

    after, o = jax.lax.scan(of_chunk, before, tuple(_chunks(x, size) for x in (q, k, v, real)))
    return _join_chunks(o, q.shape[1]), after


def no_sums(k: jax.Array, p: int) -> Sums:
    """Sums over nothing, for keys and values like k [B, L, H, d]."""
    batch, _, heads, width = k.shape
    n_features = comb(width + p, p)
    return Sums(
        jnp.zeros((batch, heads, n_features, width), k.dtype), jnp.zeros((batch, heads, n_features), k.dtype)
    )


def _add_keys(sums: Sums, k: jax.Array, v: jax.Array, real: jax.Array, p: int) -> Sums:
    phi = jnp.where(real[..., None, None], features(k, p), 0)
    return Sums(sums.values + jnp.einsum("bshm,bshd->bhmd", phi, v), sums.weights + phi.sum(axis=1))


def _from_sums(q: jax.Array, sums: Sums, p: int) -> tuple[jax.Array, jax.Array]:
    """Weighted values [B, T, H, d] and weights [B, H, T] of all keys in the sums."""
    phi = features(q, p)
    return jnp.einsum("bthm,bhmd->bthd", phi, sums.values), jnp.einsum("bthm,bhm->bht", phi, sums.weights)


def _divide(values: jax.Array, weights: jax.Array) -> jax.Array:
    """values [B, T, H, d] over weights [B, H, T]."""
    return values / guarded(weights).swapaxes(1, 2)[..., None]


def _chunks(x: jax.Array, size: int) -> jax.Array:
    """x [B, L, ...] as [n, B, size, ...], the last chunk filled up with zeros."""
    rest = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, rest)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)


def _join_chunks(x: jax.Array, length: int) -> jax.Array:
    """The first `length` tokens of [n, B, size, ...], as [B, length, ...]."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length]
