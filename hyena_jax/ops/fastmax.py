"""Fastmax attention: a polynomial in place of softmax's exponential.

    o_t = sum_s f(q_t . k_s) v_s / sum_s f(q_t . k_s),    f(x) = sum_{l=0..p} x^l / l!

From Gerami et al. 2024, arXiv 2402.07901.

Axes: B batch, T queries, S keys, L either where T = S, C chunk, n chunks, H heads, N = B H rows, d
head_dim, M features. q, k, v are [B, L, H, d]; the caller scales q . k. Everything is float32 (float64
stays).

f(q . k) is a dot product of features of q and features of k, so sums over keys can be taken first: O(L M d),
M = C(d+p, p), in place of O(L^2 d). For even p every weight is positive, at least 1/2 for p = 2. For odd p
weights may be negative and a row's sum of weights may come near 0 or change sign; `guarded` keeps it off 0.
"""

from functools import partial
from itertools import combinations_with_replacement
from math import comb, factorial, prod

import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.ops.fast.derivatives import own_derivative

STANDARDIZE_EPS = 1e-5
"""Added to the variance of a query's or key's channels."""

LEAST_WEIGHT = 1e-3
"""The least magnitude of a row's sum of weights. With even p the sum never comes near it."""

CHUNK = 256
"""Tokens whose features [B, C, H, M] are in memory at a time."""


def standardize(x: jax.Array) -> jax.Array:
    """x [..., d] with mean 0 and variance 1 over the channels of each token: no token sees another."""
    deviation = jnp.sqrt(x.var(axis=-1, keepdims=True) + STANDARDIZE_EPS)
    return (x - x.mean(axis=-1, keepdims=True)) / deviation


def kernel(x: jax.Array, p: int) -> jax.Array:
    """f(x) of x [...], by Horner's rule."""
    f = jnp.ones_like(x)
    for degree in range(p, 0, -1):
        f = 1 + f * x / degree
    return f


def features(x: jax.Array, p: int) -> jax.Array:
    """phi(x) [..., M] of x [..., d] with phi(q) . phi(k) = f(q . k) exactly.

    One feature x^alpha / sqrt(alpha!) for each multi-index alpha of degree at most p, by degree and then in
    lexicographic order. For p = 2: 1, all x_i, and x_i x_j for i <= j, divided by sqrt(2) if i = j.
    """
    return _monomials(x, p, "...d,dm->...m")


def _features_first(x: jax.Array, p: int) -> jax.Array:
    """`features` transposed: phi(x) [..., M, L] of x [..., L, d], for products that sum over L."""
    return _monomials(x, p, "...ld,dm->...ml")


def _monomials(x: jax.Array, p: int, select: str) -> jax.Array:
    """Each feature, a product of p entries of (1, x), selected by 0-1 matrices: much faster than slices."""
    width = x.shape[-1]
    indices = np.array(list(combinations_with_replacement(range(width + 1), p)))  # [M, p], 0 for the 1
    factorials = [prod(factorial(list(row).count(i)) for i in set(row) - {0}) for row in indices]
    coefficients = (np.array(factorials, np.float64) ** -0.5).astype(x.dtype)  # 1 / sqrt(alpha!)
    padded = jnp.concatenate([jnp.ones_like(x[..., :1]), x], axis=-1)
    product = coefficients if select.endswith("m") else coefficients[:, None]
    for index in indices.T:
        chosen = jax.nn.one_hot(index, width + 1, axis=0, dtype=x.dtype)  # [d + 1, M]
        product = product * jnp.einsum(select, padded, chosen, precision="highest")
    return product


def guarded(weights: jax.Array) -> jax.Array:
    """The sums of weights [...], raised to magnitude LEAST_WEIGHT with their sign kept; 0 counts as positive.

    Where a sum is raised, its gradient is 0.
    """
    least = jnp.where(weights < 0, -LEAST_WEIGHT, LEAST_WEIGHT).astype(weights.dtype)
    return jnp.where(jnp.abs(weights) < LEAST_WEIGHT, least, weights)


def fastmax_quadratic(
    q: jax.Array, k: jax.Array, v: jax.Array, p: int, mask: jax.Array | None = None
) -> jax.Array:
    """o [B, T, H, d] of q, k, v by all weights [B, H, T, S]; `mask`, True at seen keys, broadcasts."""
    f = kernel(jnp.einsum("bthd,bshd->bhts", q, k), p)
    if mask is not None:
        f = jnp.where(mask, f, 0)
    o = jnp.einsum("bhts,bshd->bthd", f, _counted(v))
    return _divide(o)


def fastmax_bidirectional(q: jax.Array, k: jax.Array, v: jax.Array, p: int) -> jax.Array:
    """o [B, T, H, d] of q, k, v over all keys, by their sums."""
    return attend_to_sums(q, key_sums(k, v, p), p)


def key_sums(k: jax.Array, v: jax.Array, p: int) -> jax.Array:
    """Sums over all keys of (features of k) ⊗ (v, 1): [B, H, M, d+1] of k, v [B, S, H, d]."""

    @jax.checkpoint
    def add_keys(sums: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        k, v = chunk
        return sums + _features_first(k, p) @ v, None

    sums = no_sums(k, p)
    rows = sums.reshape(-1, *sums.shape[2:])
    return jax.lax.scan(add_keys, rows, (_chunks(k), _chunks(_counted(v))))[0].reshape(sums.shape)


def attend_to_sums(q: jax.Array, sums: jax.Array, p: int) -> jax.Array:
    """o [B, T, H, d] of q over the keys in the sums [B, H, M, d+1], in time that does not grow with them."""
    rows = sums.reshape(-1, *sums.shape[2:])
    o = jax.lax.map(jax.checkpoint(lambda q: features(q, p) @ rows), _chunks(q))
    return _divide(_join_chunks(o, q.shape))


def fastmax_causal(
    q: jax.Array, k: jax.Array, v: jax.Array, p: int, before: jax.Array, real: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """o [B, L, H, d] of q, k, v over the keys up to each query, and the sums after the last key.

    `before` are the sums over earlier keys (`no_sums` at the start); `real`, bool [B, L], is False for keys
    that do not count. Inside a chunk the weights are computed directly; all earlier keys enter by their sums.
    The backward pass runs over the chunks in reverse, with sums over later queries; it keeps only the sums
    before each chunk, no features.
    """
    values = _counted(v) if real is None else jnp.where(real[..., None, None], _counted(v), 0)
    rows = before.reshape(-1, *before.shape[2:])
    causal = own_derivative(partial(_causal, p=p), partial(_causal_pull_back, p=p))
    o, after = causal(_chunks(q), _chunks(k), _chunks(values), rows)
    return _divide(_join_chunks(o, q.shape)), after.reshape(before.shape)


def no_sums(k: jax.Array, p: int) -> jax.Array:
    """Sums over no keys of features ⊗ (values, 1): [B, H, M, d+1], for k and v [B, L, H, d]."""
    batch, _, heads, width = k.shape
    return jnp.zeros_like(k, shape=(batch, heads, comb(width + p, p), width + 1))


def _causal(
    q: jax.Array, k: jax.Array, v: jax.Array, before: jax.Array, p: int
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """Weighted sums of v [n, N, C, d+1] with q, k [n, N, C, d], and the sums [N, M, d+1] after all chunks.

    The residuals are q, k, v and the sums [n, N, M, d+1] before each chunk.
    """

    def of_chunk(sums: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple]:
        q, k, v = chunk
        o = jnp.tril(kernel(_products(q, k), p)) @ v + features(q, p) @ sums
        return sums + _features_first(k, p) @ v, (o, sums)

    after, (o, sums) = jax.lax.scan(of_chunk, before, (q, k, v))
    return (o, after), (q, k, v, sums)


def _causal_pull_back(
    residuals: tuple[jax.Array, ...], bars: tuple[jax.Array, jax.Array], p: int
) -> tuple[jax.Array, ...]:
    """`later` is the gradient of the sums after a chunk: phi(q) ⊗ o_bar summed over the later queries."""

    def of_chunk(later: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple]:
        q, k, v, sums, o_bar = chunk
        x = _products(q, k)
        x_bar = jnp.tril(kernel(x, p - 1)) * _products(o_bar, v)  # f' is f of degree p - 1
        phi_k, pull_back_k = jax.vjp(lambda k: features(k, p), k)
        _, pull_back_q = jax.vjp(lambda q: features(q, p), q)
        q_bar = x_bar @ k + pull_back_q(_products(o_bar, sums))[0]
        k_bar = x_bar.mT @ q + pull_back_k(_products(v, later))[0]
        v_bar = jnp.tril(kernel(x, p)).mT @ o_bar + phi_k @ later
        return later + _features_first(q, p) @ o_bar, (q_bar, k_bar, v_bar)

    o_bar, after_bar = bars
    before_bar, chunk_bars = jax.lax.scan(of_chunk, after_bar, (*residuals, o_bar), reverse=True)
    return *chunk_bars, before_bar


def _products(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum("ntd,nsd->nts", x, y)


def _counted(v: jax.Array) -> jax.Array:
    """(v, 1): the extra channel accumulates the sum of weights."""
    return jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)


def _divide(o: jax.Array) -> jax.Array:
    """Weighted values o[..., :d] divided by the sum of weights in the last channel."""
    return o[..., :-1] / guarded(o[..., -1:])


def _chunks(x: jax.Array) -> jax.Array:
    """x [B, L, H, d] as [n, N, C, d], the last chunk padded with zeros."""
    batch, length, heads, width = x.shape
    size = min(CHUNK, length)
    x = jnp.pad(x, [(0, 0), (0, -length % size), (0, 0), (0, 0)])
    x = x.reshape(batch, -1, size, heads, width).transpose(1, 0, 3, 2, 4)
    return x.reshape(-1, batch * heads, size, width)


def _join_chunks(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The tokens [B, L, H, ...] of [n, N, C, ...], where `shape` is [B, L, H, d]."""
    batch, length, heads, _ = shape
    x = x.reshape(-1, batch, heads, *x.shape[2:]).transpose(1, 0, 3, 2, 4)
    return x.reshape(batch, -1, *x.shape[3:])[:, :length]
