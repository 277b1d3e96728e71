"""Sums of the attention-free transformer with position biases, a block of queries at a time.

Sums, keys, values and axes are as in `hyena_jax.ops.aft`.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from hyena_jax.ops.aft import EMPTY, Bias, Places, Sums, merge, pad_end, running_sums
from hyena_jax.ops.fast.broadcasting import sum_products, sum_to
from hyena_jax.ops.fast.derivatives import own_derivative

Tree = TypeVar("Tree")

QUERY_BLOCK = 16
"""Queries whose weights are computed at a time."""

PRODUCT_RANGE = 30
"""Largest difference between keys at which exp(k) exp(w) may stand for exp(k + w).

A sum of weights is then at least exp(-30), and its inverse square, which the derivative of the mean needs,
fits in float32.
"""


class _PlacedKeys(NamedTuple):
    """Keys [B, S, H, c], values [B, S, H, d] and their places."""

    keys: jax.Array
    values: jax.Array
    places: Places


def full_sums(
    keys: jax.Array, values: jax.Array, bias: Bias, queries: Places, seen: Places, own: jax.Array
) -> Sums:
    """Sums of T queries over the S keys, as far as `bias` lets a query see them: O(T S) work, O(S) memory.

    Args:
      queries: places of the queries.
      seen: places of the keys.
      own: index of the first query's own key, int32 []; the other queries' keys follow it.
    """
    n_queries = queries.position.shape[1]
    if n_queries == 1:  # matrix products pay off only where several queries share them
        return biased_sums(keys, values, _between(queries, seen, bias))
    block = min(QUERY_BLOCK, n_queries)
    rest = -n_queries % block
    tokens = _pad_tokens(_PlacedKeys(keys, values, seen), rest)
    queries = jax.tree.map(lambda x: pad_end(x, rest), queries)
    index = jnp.arange(tokens.keys.shape[1], dtype=jnp.int32)[:, None, None]

    def of_block(start: jax.Array) -> Sums:
        earlier = tokens._replace(keys=jnp.where(index < own + start, tokens.keys, EMPTY))
        of_queries = _cut(tokens, own + start, block)
        return _block_sums(_cut(queries, start, block), earlier, of_queries, bias)

    return _over_blocks(of_block, n_queries, block)


def window_sums(
    keys: jax.Array, values: jax.Array, bias: Bias, before: Sums, seen: Places, window: int
) -> tuple[Sums, Sums]:
    """Sums with w in a window of K keys, the query's own and the K - 1 before it, and w = 0 before that.

    The window is summed directly. A correction (exp(w) - 1) exp(k) to sums over all keys would cancel where
    w is very negative.

    Args:
      keys: K - 1 keys before the T queries' own (EMPTY where there are none), then the T queries' own.
      before: sums [B, 1, ...] over all keys before these.
      seen: places of the keys.
      window: K.

    Returns:
      The sums of the T queries, and sums [B, 1, ...] over all but the last K - 1 keys.
    """
    n_queries = keys.shape[1] - (window - 1)
    # Sums over the key that leaves the window after query t, and all keys before it.
    left = running_sums(keys[:, :n_queries], values[:, :n_queries], before, seen.document[:, :n_queries])
    outside = jax.tree.map(lambda a, b: jnp.concatenate([a, b[:, :-1]], axis=1), before, left)
    document = jnp.concatenate([seen.document[:, :1], seen.document[:, : n_queries - 1]], axis=1)
    same = (document == seen.document[:, window - 1 :])[..., None, None]
    # Scaled by EMPTY, these sums vanish next to the window's, which hold at least the query's own key.
    outside = outside._replace(largest=jnp.where(same, outside.largest, EMPTY))
    inside = _inside_sums(_PlacedKeys(keys, values, seen), bias, window)
    return merge(outside, inside), jax.tree.map(lambda x: x[:, -1:], left)


def _inside_sums(tokens: _PlacedKeys, bias: Bias, window: int) -> Sums:
    """Sums of each query over its window."""
    n_queries = tokens.keys.shape[1] - (window - 1)
    block = min(QUERY_BLOCK, n_queries)
    tokens = _pad_tokens(tokens, -n_queries % block)

    def of_block(start: jax.Array) -> Sums:
        own = _cut(tokens, start + window - 1, block)
        return _block_sums(own.places, _cut(tokens, start, window - 1), own, bias)

    return _over_blocks(of_block, n_queries, block)


def _block_sums(queries: Places, earlier: _PlacedKeys, own: _PlacedKeys, bias: Bias) -> Sums:
    """Sums of a block of queries over the keys before the block and the block's own keys.

    Only the earlier keys go through matrix products. A product is scaled by the largest of all its keys, and
    among the block's own keys that may be one that a query must not see.
    """
    w = _between(queries, earlier.places, bias)
    # No query sees earlier keys outside the first query's document, so no such key may set the scale.
    same = earlier.places.document == queries.document[:, :1]
    keys = jnp.where(same[..., None, None], earlier.keys, EMPTY)
    before = jax.lax.cond(_differ_little(keys), product_sums, biased_sums, keys, earlier.values, w)
    return merge(before, biased_sums(own.keys, own.values, _between(queries, own.places, bias)))


def biased_sums(keys: jax.Array, values: jax.Array, bias: jax.Array) -> Sums:
    """Sums of each query over all keys, with exponents keys + bias; bias [B or 1, T, S, H or 1].

    The backward pass is written by hand, so that it sums in the fast order (see `sum_products`).
    """
    return own_derivative(_biased_sums, _biased_sums_pull_back)(keys, values, bias)


def _biased_sums(keys: jax.Array, values: jax.Array, bias: jax.Array) -> tuple[Sums, tuple]:
    exponents = keys[:, None] + bias[..., None]
    largest = jax.lax.stop_gradient(exponents.max(axis=2, initial=EMPTY))
    weights = jnp.where(exponents > EMPTY / 2, jnp.exp(exponents - largest[:, :, None]), 0)
    if weights.shape[-1] == 1:
        weighted = jnp.einsum("btsh,bshd->bthd", weights[..., 0], values, precision="highest")
    else:
        weighted = sum_products(weights * values[:, None], 2)
    return Sums(largest, weighted, weights.sum(axis=2)), (weights, values, bias)


def _biased_sums_pull_back(residuals: tuple, dsums: Sums) -> tuple[jax.Array, jax.Array, jax.Array]:
    weights, values, bias = residuals
    if weights.shape[-1] == 1:
        dweights = jnp.einsum("bthd,bshd->btsh", dsums.weighted, values, precision="highest")[..., None]
        dvalues = jnp.einsum("btsh,bthd->bshd", weights[..., 0], dsums.weighted, precision="highest")
    else:
        dweights = dsums.weighted[:, :, None] * values[:, None]
        dvalues = sum_products(weights * dsums.weighted[:, :, None], 1)
    dexponents = weights * (dweights + dsums.weights[:, :, None])
    return sum_products(dexponents, 1), dvalues, sum_to(dexponents.sum(-1), bias.shape)


def product_sums(keys: jax.Array, values: jax.Array, bias: jax.Array) -> Sums:
    """`biased_sums` by matrix products of exp(bias) and exp(keys), each scaled by its own maximum.

    All exponents that a query sees may lie below the sum of the two maxima, but by at most the keys' spread.
    """
    most = jax.lax.stop_gradient(keys.max(axis=1, keepdims=True, initial=EMPTY))
    most_bias = jax.lax.stop_gradient(bias.max(axis=2, keepdims=True, initial=EMPTY))
    of_keys = jnp.where(keys > EMPTY / 2, jnp.exp(keys - most), 0)
    of_bias = jnp.where(bias > EMPTY / 2, jnp.exp(bias - most_bias), 0)
    of_bias = jnp.broadcast_to(of_bias, (len(keys), *bias.shape[1:-1], keys.shape[2]))
    weighted = jnp.einsum("btsh,bshd->bthd", of_bias, of_keys * values)
    return Sums(most + most_bias[:, :, 0, :, None], weighted, jnp.einsum("btsh,bshc->bthc", of_bias, of_keys))


def _differ_little(keys: jax.Array) -> jax.Array:
    """Whether the keys of each channel are so close that `product_sums` loses nothing: bool []."""
    least = jnp.where(keys > EMPTY / 2, keys, jnp.inf).min(axis=1, initial=jnp.inf)
    return jnp.all(keys.max(axis=1, initial=EMPTY) - least < PRODUCT_RANGE)


def _between(queries: Places, keys: Places, bias: Bias) -> jax.Array:
    """Position biases [B or 1, T, S, H or 1], EMPTY between documents."""
    same = queries.document[:, :, None] == keys.document[:, None]
    return jnp.where(same[..., None], bias(queries.position, keys.position), EMPTY)


def _pad_tokens(tokens: _PlacedKeys, n: int) -> _PlacedKeys:
    """The tokens, followed by n that no query sees."""
    values, seen = jax.tree.map(lambda x: pad_end(x, n), (tokens.values, tokens.places))
    return _PlacedKeys(pad_end(tokens.keys, n, EMPTY), values, seen)


def _cut(tree: Tree, start: jax.Array, size: int) -> Tree:
    """`size` tokens from `start` of each leaf [B or 1, L, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=1), tree)


def _over_blocks(of_block: Callable[[jax.Array], Sums], n_queries: int, block: int) -> Sums:
    """Sums [B, T, ...] from the sums [B, block, ...] of each block, called with its first query's index.

    The backward pass recomputes each block, so the weights of only one block are in memory.
    """
    starts = jnp.arange(0, n_queries, block, dtype=jnp.int32)
    sums = jax.lax.map(jax.checkpoint(of_block), starts)  # [n_blocks, B, block, ...]
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :n_queries], sums)
