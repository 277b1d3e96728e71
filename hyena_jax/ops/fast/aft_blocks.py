"""Sums of the attention-free transformer with position biases, a block of queries at a time.

Sums, keys, values, biases and axes are as in `hyena_jax.ops.aft`. A query sees the keys of its document up to
its own: as many as its position in the document, plus one.
"""

import math

import jax
import jax.numpy as jnp

from hyena_jax.ops.aft import EMPTY, Bias, Sums, merge, no_sums, pad_end, running_sums, weighted_sums

LEAST_BLOCK = 16
"""Fewest queries whose weights are computed at a time, where there are so many."""

PRODUCT_RANGE = 30
"""Largest difference between keys at which exp(k) exp(w) may stand for exp(k + w).
A sum of weights is then at least exp(-30), and its inverse square, which the mean's derivative needs, fits
in float32."""

Window = tuple[jax.Array, jax.Array, Sums]
"""What follows a window: its last K - 1 keys and values, and the sums [B, 1, ...] over all earlier keys."""


def blockwise_sums(
    keys: jax.Array,
    values: jax.Array,
    bias: Bias,
    positions: jax.Array,
    own: jax.Array | int = 0,
    window: int | None = None,
) -> Sums:
    """Sums of T queries over the S keys, as far as a query sees them: O(T S) work.

    In memory are keys, values and sums, and a block's weights: O(S^1.5) for each head, O(S) for each channel.
    With a window, the most keys K that a query sees, O(T K) work, and S >= K - 1 + T: the K - 1 keys before
    the first query's are there. The queries are at `positions`, int32 [B or 1, T], in their documents; `own`,
    int32 [], is the index of the first query's own key, which the other queries' keys follow.
    """
    n_queries = positions.shape[1]
    # With b queries in a block and n keys before it, a block takes n + b^2 exponentials for each channel: the
    # fewest for each query at b = sqrt(n). Smaller blocks than LEAST_BLOCK cost more than they save.
    block = min(max(LEAST_BLOCK, math.isqrt(window or keys.shape[1])), n_queries)
    rest = -n_queries % block
    keys, values, positions = pad_end(keys, rest, EMPTY), pad_end(values, rest), pad_end(positions, rest)
    n_earlier = keys.shape[1] if window is None else window - 1
    of_block = jnp.arange(block, dtype=jnp.int32)

    def visible_bias(
        queries: jax.Array, seen: jax.Array, after: jax.Array, least: jax.Array | int = 0
    ) -> jax.Array:
        """w of queries and keys at positions `queries` and `seen`, from a lag of `least` on.

        The keys are `after` [S] the first query's own.
        """
        lag = of_block[:, None] - after
        reach = queries if window is None else jnp.minimum(queries, window - 1)
        is_visible = (lag >= least) & (lag <= reach[:, :, None])
        return jnp.where(is_visible[..., None], bias(queries, seen), EMPTY)

    if n_queries == 1:  # matrix products pay off only where several queries share them
        after = jnp.arange(keys.shape[1], dtype=jnp.int32) - own
        return weighted_sums(keys, values, visible_bias(positions, positions + after, after))

    def sums_of_block(start: jax.Array) -> Sums:
        first = own + start
        begin = 0 if window is None else first - n_earlier
        queries = _cut(positions, start, block)
        after = begin - first + jnp.arange(n_earlier, dtype=jnp.int32)
        seen = queries[:, :1] + after
        # Only the earlier keys go through matrix products. A product is scaled by the largest of all its
        # keys, and of all its biases: among the block's own, or outside the first query's document, no query
        # may see that one.
        is_earlier = (after < 0) & (seen >= 0)
        earlier = jnp.where(is_earlier[..., None, None], _cut(keys, begin, n_earlier), EMPTY)
        before = jax.lax.cond(
            _differ_little(earlier),
            product_sums,
            sums_in_parts,
            earlier,
            _cut(values, begin, n_earlier),
            visible_bias(queries, seen, after, least=of_block[:, None] + 1),
        )
        own_keys, own_values = (_cut(x, first, block) for x in (keys, values))
        return merge(before, weighted_sums(own_keys, own_values, visible_bias(queries, queries, of_block)))

    # The backward pass recomputes each block, so the weights of only one block are in memory.
    starts = jnp.arange(0, n_queries, block, dtype=jnp.int32)
    sums = jax.lax.map(jax.checkpoint(sums_of_block), starts)  # [n_blocks, B, block, ...]
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :n_queries], sums)


def sums_in_parts(keys: jax.Array, values: jax.Array, w: jax.Array) -> Sums:
    """`weighted_sums` of a few queries at a time, so that their weights [B, few, S, H, c] fit into memory."""

    @jax.checkpoint  # else `cond` fills these weights with zeros where it takes the products
    def sums_of_query(w: jax.Array) -> Sums:
        return weighted_sums(keys, values, w[:, None])

    sums = jax.lax.map(sums_of_query, w.swapaxes(0, 1), batch_size=LEAST_BLOCK)
    return jax.tree.map(lambda x: x[:, :, 0].swapaxes(0, 1), sums)


def window_sums(
    keys: jax.Array, values: jax.Array, bias: Bias, positions: jax.Array, before: Window, window: int
) -> tuple[Sums, Window]:
    """Sums of T queries with w inside a window of K keys that ends at their own, and w = 0 before the window.

    The window is summed directly. A correction (exp(w) - 1) exp(k) to sums over all keys would cancel where
    w is very negative. Keys are the T queries' own; positions, int32 [B or 1, T], the queries' in documents.
    """
    n_queries, n_kept = keys.shape[1], window - 1
    earlier_keys, earlier_values, sums = before
    keys = jnp.concatenate([earlier_keys, keys], axis=1)
    values = jnp.concatenate([earlier_values, values], axis=1)
    # Sums over the key that leaves the window after query t, and all keys before it.
    documents = positions - jnp.arange(n_queries, dtype=jnp.int32)
    documents = jnp.pad(documents, [(0, 0), (n_kept, 0)], mode="edge")[:, :n_queries]
    left = running_sums(keys[:, :n_queries], values[:, :n_queries], sums, documents)
    outside = jax.tree.map(lambda a, b: jnp.concatenate([a, b[:, :-1]], axis=1), sums, left)
    # Scaled by EMPTY, these sums vanish next to the window's, which hold at least the query's own key.
    is_visible = (positions >= window)[..., None, None]
    outside = outside._replace(largest=jnp.where(is_visible, outside.largest, EMPTY))
    inside = blockwise_sums(keys, values, bias, positions, n_kept, window)
    after = (keys[:, n_queries:], values[:, n_queries:], jax.tree.map(lambda x: x[:, -1:], left))
    return merge(outside, inside), after


def no_window(keys: jax.Array, values: jax.Array, window: int) -> Window:
    """The window before the first key, in the shapes and dtypes of keys and values."""
    n_kept = window - 1
    earlier_keys = jnp.full_like(keys, EMPTY, shape=(len(keys), n_kept, *keys.shape[2:]))
    earlier_values = jnp.zeros_like(values, shape=(len(values), n_kept, *values.shape[2:]))
    return earlier_keys, earlier_values, no_sums(keys, values)


def product_sums(keys: jax.Array, values: jax.Array, w: jax.Array) -> Sums:
    """`weighted_sums` by matrix products of exp(w) and exp(keys), each scaled by its own maximum.

    All exponents that a query sees may lie below the sum of the two maxima, but by at most the keys' spread.
    """
    most = jax.lax.stop_gradient(keys.max(axis=1, keepdims=True, initial=EMPTY))
    most_bias = jax.lax.stop_gradient(w.max(axis=2, keepdims=True, initial=EMPTY))
    of_keys = jnp.where(keys > EMPTY / 2, jnp.exp(keys - most), 0)
    of_bias = jnp.where(w > EMPTY / 2, jnp.exp(w - most_bias), 0)
    of_bias = jnp.broadcast_to(of_bias, (len(keys), *w.shape[1:-1], keys.shape[2]))
    weighted = jnp.einsum("btsh,bshd->bthd", of_bias, of_keys * values)
    return Sums(most + most_bias[:, :, 0, :, None], weighted, jnp.einsum("btsh,bshc->bthc", of_bias, of_keys))


def _differ_little(keys: jax.Array) -> jax.Array:
    """Whether the keys of each channel are so close that `product_sums` loses nothing: bool []."""
    least = jnp.where(keys > EMPTY / 2, keys, jnp.inf).min(axis=1, initial=jnp.inf)
    return jnp.all(keys.max(axis=1, initial=EMPTY) - least < PRODUCT_RANGE)


def _cut(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """`size` tokens of x [B or 1, L, ...] from `start`."""
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
