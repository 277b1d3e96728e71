"""Weighted means of the attention-free transformer, always finite.

    mean_t = sum_{s<=t} exp(k_s + w_{t,s}) v_s / sum_{s<=t} exp(k_s + w_{t,s})

From Zhai et al. 2021, arXiv 2105.14103.

Axes: B batch, T queries, S keys, L either where T = S, H heads, d head_dim, K taps, R rank. Values are
[B, S, H, d]; keys are [B, S, H, c], with c = d, or c = 1 where a head has one key. `B or 1` is 1 where all
rows are equal. Everything is float32 (float64 stays). The caller applies the gate sigmoid(q_t).

Each query's sums are scaled by exp(-largest exponent among its keys): no exponential overflows, no
denominator comes near 0, and nothing depends on a later key. The scale cancels in the mean, so the largest
exponent is a constant for the derivative.

This file holds the sums with w = 0 and the biases w; `aft_blocks` holds the sums with w.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.ops.documents import documents

EMPTY = -1e30
"""Exponent of padding and of keys that a query does not see. Such a key has weight exactly 0."""

TAPS_EPS = 1e-8
"""Added to the variance of a head's taps, which is 0 for a single tap."""


class Sums(NamedTuple):
    """The largest exponent e [B, T, H, c], sum_s exp(e_s - e) v_s [B, T, H, d], sum_s exp(e_s - e)."""

    largest: jax.Array
    weighted: jax.Array
    weights: jax.Array


class Places(NamedTuple):
    """Position of each token in its document, and number of that document in its row: int32 [B or 1, L]."""

    position: jax.Array
    document: jax.Array


# Position biases w [B or 1, T, S, H or 1] of positions [B or 1, T] and [B or 1, S]; EMPTY where s is unseen.
Bias = Callable[[jax.Array, jax.Array], jax.Array]


def places(length: int, segment_ids: jax.Array | None = None) -> Places:
    """Places in rows of L tokens; a document starts where segment_ids [B, L] change. None: one document."""
    if segment_ids is None:
        index = jnp.arange(length, dtype=jnp.int32)[None]
        return Places(index, jnp.zeros_like(index))
    found = documents(segment_ids)
    return Places(found.position, found.number)


def mean(sums: Sums) -> jax.Array:
    """The weighted mean [B, T, H, d]; 0 where no key was seen."""
    return sums.weighted / jnp.where(sums.weights > 0, sums.weights, 1)


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
    """Running sums with w = 0 over the keys of each key's document: [B, S, ...], in O(S) work and memory.

    About sqrt(S) blocks of about sqrt(S) keys: one scan runs inside all blocks at once, one over the blocks.

    Args:
      before: sums [B, 1, ...] over the earlier keys of the first key's document.
      documents: document of each key, int32 [B or 1, S].
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


def low_rank_bias(u: jax.Array, v: jax.Array, window: int | None = None) -> Bias:
    """w_{t,s} = u_t . v_s for the last `window` keys s, the query's own among them; u, v [Lmax, R].

    That is 0 <= t - s < window; with None, all s <= t. (A window of w in `ops.attention` has w + 1 keys.)
    """
    u, v = jnp.asarray(u), jnp.asarray(v)  # a bound module's parameters may be NumPy arrays

    def bias(queries: jax.Array, keys: jax.Array) -> jax.Array:
        lag = queries[:, :, None] - keys[:, None]
        visible = lag >= 0 if window is None else (lag >= 0) & (lag < window)
        # Only padding has positions below 0, and the keys of padding are EMPTY.
        rows = [x.at[position].get(mode="clip") for x, position in ((u, queries), (v, keys))]
        w = jnp.einsum("btr,bsr->bts", *rows)
        return jnp.where(visible, w, EMPTY)[..., None]

    return bias


def tap_bias(taps: jax.Array) -> Bias:
    """w^h_{t,s} = taps^h_{t-s} for 0 <= t - s < K; taps [H, K]."""

    def bias(queries: jax.Array, keys: jax.Array) -> jax.Array:
        lag = (queries[:, :, None] - keys[:, None])[..., None]
        w = taps.T.at[lag[..., 0]].get(mode="clip")
        return jnp.where((lag >= 0) & (lag < taps.shape[1]), w, EMPTY)

    return bias


def standardize_taps(taps: jax.Array, gamma: jax.Array, beta: jax.Array) -> jax.Array:
    """gamma (w - mean(w)) / std(w) + beta over the taps of each head; w [H, K], gamma and beta [H]."""
    deviation = jnp.sqrt(taps.var(axis=1, keepdims=True) + TAPS_EPS)
    centred = taps - taps.mean(axis=1, keepdims=True)
    return gamma[:, None] * centred / deviation + beta[:, None]
