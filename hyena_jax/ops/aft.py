"""Weighted means of the attention-free transformer, always finite.

    mean_t = sum_{s<=t} exp(k_s + w_{t,s}) v_s / sum_{s<=t} exp(k_s + w_{t,s})

From Zhai et al. 2021, arXiv 2105.14103.

Axes: B batch, T queries, S keys, L either where T = S, H heads, d head_dim, K taps, R rank. Values are
[B, S, H, d]; keys are [B, S, H, c], with c = d, or c = 1 where a head has one key. `B or 1` is 1 where all
rows are equal. Everything is float32 (float64 stays). The caller applies the gate sigmoid(q_t).

Each query's sums are scaled by exp(-largest exponent among its keys): no exponential overflows, no
denominator comes near 0, and nothing depends on a later key. The scale cancels in the mean, so the largest
exponent is a constant for the derivative.

A constant added to all keys of a channel cancels, too: the gradient of a bias of the keys is 0, and float32
gives the rounding of a sum over the tokens, 1.4e-7 beside a largest gradient of 4.8 at 127 tokens. No error
relative to that gradient itself says anything.

The sums with w, block by block, are in `fast.aft_blocks`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.ops.fast.derivatives import sum_products

EMPTY = -1e30
"""Exponent of padding and of keys that a query does not see. Such a key has weight exactly 0."""

TAPS_EPS = 1e-8
"""Added to the variance of a head's taps, which is 0 for a single tap."""


class Sums(NamedTuple):
    """The largest exponent e [B, T, H, c], sum_s exp(e_s - e) v_s [B, T, H, d], sum_s exp(e_s - e)."""

    largest: jax.Array
    weighted: jax.Array
    weights: jax.Array


Bias = Callable[[jax.Array, jax.Array], jax.Array]
"""Position biases w [B or 1, T, S, H or 1] of queries and keys at positions [B or 1, T] and [B or 1, S].
Any value where one is not a position, or the query does not see the key."""


def mean(sums: Sums) -> jax.Array:
    """The weighted mean [B, T, H, d]; 0 where no key was seen."""
    return sums.weighted / jnp.where(sums.weights > 0, sums.weights, 1)


def weighted_sums(keys: jax.Array, values: jax.Array, w: jax.Array) -> Sums:
    """Sums of each query over keys and values; w [B or 1, T, S, H or 1] is EMPTY where a key is unseen."""
    exponents = keys[:, None] + w[..., None]
    largest = jax.lax.stop_gradient(exponents.max(axis=2, initial=EMPTY))
    weights = jnp.where(exponents > EMPTY / 2, jnp.exp(exponents - largest[:, :, None]), 0)
    if weights.shape[-1] == 1:
        weighted = jnp.einsum("btsh,bshd->bthd", weights[..., 0], values, precision="highest")
    else:
        weighted = sum_products(weights * values[:, None], 2)
    return Sums(largest, weighted, weights.sum(axis=2))


def pad_end(x: jax.Array, n: int, fill: float = 0) -> jax.Array:
    """x [B, L, ...] with n more of `fill` along L."""
    return jnp.pad(x, [(0, 0), (0, n)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)


def no_sums(keys: jax.Array, values: jax.Array) -> Sums:
    """Sums over no keys, [B, 1, ...], in the shapes and dtypes of keys and values."""
    zeros = jnp.zeros_like(keys, shape=(keys.shape[0], 1, *keys.shape[2:]))
    return Sums(zeros + EMPTY, jnp.zeros_like(values, shape=(values.shape[0], 1, *values.shape[2:])), zeros)


def merge(a: Sums, b: Sums) -> Sums:
    """Sums over the keys of a and of b."""
    largest = jnp.maximum(a.largest, b.largest)
    of_a, of_b = jnp.exp(a.largest - largest), jnp.exp(b.largest - largest)
    return Sums(largest, of_a * a.weighted + of_b * b.weighted, of_a * a.weights + of_b * b.weights)


class DocumentSums(NamedTuple):
    """The document [B or 1, T, 1, 1] of a run's last key, and sums over the run's keys in that document."""

    document: jax.Array
    sums: Sums


def join(a: DocumentSums, b: DocumentSums) -> DocumentSums:
    """The sums over a's keys followed by b's keys."""
    same = a.document == b.document
    sums = jax.tree.map(lambda both, of_b: jnp.where(same, both, of_b), merge(a.sums, b.sums), b.sums)
    return DocumentSums(b.document, sums)


def running_sums(keys: jax.Array, values: jax.Array, before: Sums, documents: jax.Array) -> Sums:
    """Running sums of keys and values with w = 0, in each document: [B, S, ...], in O(S) work and memory.

    `before` [B, 1, ...] has the earlier keys of the first key's document; `documents` is int32 [B or 1, S].
    About sqrt(S) blocks of about sqrt(S) keys: one scan runs inside all blocks at once, one over the blocks.
    """
    n_keys = keys.shape[1]
    block = math.isqrt(n_keys - 1) + 1
    rest = -n_keys % block
    keys, values, documents = pad_end(keys, rest, EMPTY), pad_end(values, rest), pad_end(documents, rest)
    largest = jax.lax.stop_gradient(keys)
    # exp(k - k) is 1; it is there for its derivative.
    weights = jnp.where(keys > EMPTY / 2, jnp.exp(keys - largest), 0)
    terms = DocumentSums(documents[..., None, None], Sums(largest, weights * values, weights))
    start = DocumentSums(terms.document[:, :1], before)
    # [block, B, n_blocks, H, ...]: a step of the first scan takes one key of every block.
    terms = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(len(x), -1, block, *x.shape[2:]), 2, 0), terms)
    nothing = jax.tree.map(
        lambda x, fill: jnp.full_like(x[0], fill), terms, DocumentSums(0, Sums(EMPTY, 0, 0))
    )
    blocks, inside = jax.lax.scan(lambda run, key: (join(run, key),) * 2, nothing, terms)
    # A step of the second scan takes a block and returns the sums before it.
    blocks = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, None], 1, 0), blocks)
    outside = jax.lax.scan(lambda run, block: (join(run, block), run), start, blocks)[1]
    outside = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, 0], 0, 1), outside)
    sums = join(outside, inside).sums
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 2).reshape(x.shape[1], -1, *x.shape[3:])[:, :n_keys], sums
    )


def low_rank_bias(u: jax.Array, v: jax.Array) -> Bias:
    """w_{t,s} = u_t . v_s; u, v [Lmax, R]."""
    u, v = jnp.asarray(u), jnp.asarray(v)  # a bound module's parameters may be NumPy arrays

    def bias(queries: jax.Array, keys: jax.Array) -> jax.Array:
        rows = [x.at[position].get(mode="clip") for x, position in ((u, queries), (v, keys))]
        return jnp.einsum("btr,bsr->bts", *rows)[..., None]

    return bias


def tap_bias(taps: jax.Array) -> Bias:
    """w^h_{t,s} = taps^h_{t-s}; taps [H, K]."""
    return lambda queries, keys: taps.T.at[queries[:, :, None] - keys[:, None]].get(mode="clip")


def standardize_taps(taps: jax.Array, gamma: jax.Array, beta: jax.Array) -> jax.Array:
    """gamma (w - mean(w)) / std(w) + beta over the taps of each head; w [H, K], gamma and beta [H]."""
    deviation = jnp.sqrt(taps.var(axis=1, keepdims=True) + TAPS_EPS)
    centred = taps - taps.mean(axis=1, keepdims=True)
    return gamma[:, None] * centred / deviation + beta[:, None]
