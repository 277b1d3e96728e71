"""Softmax attention softmax(Q K^T / sqrt(d) + mask) V, over all keys or a window, and rotary positions.

Axes: B batch, T queries, S keys, L either where T = S, H heads, G heads of keys and values, R = H/G query
heads that share one, N blocks of t queries each, d head_dim. Query head h attends with key head h // R.
`B or 1` is 1 where the rows do not differ.

Every form is differentiable in forward and reverse mode, any number of times.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# Rows of weights (t R) in a block of `blocked_attention`, and the most key ranges, each compiled once.
BLOCK_ROWS = 256
MOST_RANGES = 8
# XLA for CPUs transposes the weights [t, S] of a block for the gradients of keys and values. If S is a power
# of two that takes twice as long: the rows compete for the same cache lines. Padding the keys avoids it.
MORE_KEYS = 16

ROW_MAXIMUM = "attention_row_maximum"


class Visible(NamedTuple):
    """Which keys a query sees: every key that no field hides. A field that is None hides nothing."""

    is_causal: bool = False
    """Query t sees keys s <= offset + t only."""
    window: int | None = None
    """Query t sees keys s >= offset + t - window only: if causal, `window` keys and the query's own."""
    offset: int | jax.Array = 0
    """Position of the first query among the keys: an int, or an integer array []."""
    real: jax.Array | None = None
    """Boolean [B or 1, S], False at keys that no query may see."""
    segment_ids: tuple[jax.Array, jax.Array] | None = None
    """Integers of queries [B or 1, T] and keys [B or 1, S]: a query sees only keys of the same id."""


# A form of attention: (q [B, T, H, d], k [B, S, G, d], v [B, S, G, d], visible) -> [B, T, H, d] in the dtype
# of q. The softmax is computed in float32 (float64 stays float64). A query that sees no key gets some finite
# value.
Attention = Callable[[jax.Array, jax.Array, jax.Array, Visible], jax.Array]


def softmax_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    is_causal: bool = False,
    offset: int | jax.Array = 0,
    real: jax.Array | None = None,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    method: Attention | None = None,
) -> jax.Array:
    """Attends with q [B, T, H, d] over k, v [B, S, G, d]; returns [B, T, H, d].

    Args:
      is_causal: query t sees keys s <= offset + t.
      offset: position of the first query among the keys, an int or an integer array []; an int lets
        `blocked_attention` skip keys that come later.
      real: boolean [B or 1, S], False at keys that no query may see; None is everywhere True.
      segment_ids: integers of the queries [B or 1, T] and of the keys [B or 1, S]; a query sees only keys of
        its own id. None is one segment.
      method: `plain_attention`, `blocked_attention`, or another function of this kind; None is
        `default_method()`.

    The softmax is computed in float32 (float64 stays float64). A query without a visible key gets some finite
    value.
    """
    visible = Visible(is_causal, None, offset, real, segment_ids)
    return (method or default_method())(q, k, v, visible)


def default_method(platform: str | None = None) -> Attention:
    """The form for a platform, "cpu", "gpu" or "tpu"; None is JAX's default backend.

    On a CPU `cpu_attention`. On a GPU and a TPU `plain_attention`: blocks are not measured there.
    """
    return cpu_attention if (platform or jax.default_backend()) == "cpu" else plain_attention


def cpu_attention(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible) -> jax.Array:
    """`blocked_attention` for more than BLOCK_ROWS queries, `plain_attention` for fewer."""
    return (blocked_attention if q.shape[1] > BLOCK_ROWS else plain_attention)(q, k, v, visible)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible) -> jax.Array:
    """Attention by all weights [B, H, T, S] at once, with `jax.nn.dot_product_attention`."""
    n_queries, n_keys = q.shape[1], k.shape[1]
    starts_level = isinstance(visible.offset, int) and visible.offset == 0
    is_triangle = visible.is_causal and starts_level and n_queries == n_keys  # as the library means is_causal
    query_ids, key_ids = visible.segment_ids or (None, None)
    queries = _MaskInputs(visible.offset + jnp.arange(n_queries, dtype=jnp.int32), None, query_ids)
    keys = _MaskInputs(jnp.arange(n_keys, dtype=jnp.int32), visible.real, key_ids)
    mask = _mask(queries, keys, visible.is_causal and not is_triangle, visible.window)
    mask = None if mask is None else mask[:, None]
    if q.dtype == jnp.float64:  # the library's softmax would round it to float32
        return _plain_in_float64(q, k, v, mask, is_triangle)
    with jax.numpy_dtype_promotion("standard"):  # it mixes float32 logits and the inputs' dtype on purpose
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=is_triangle)


def _plain_in_float64(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, is_causal: bool
) -> jax.Array:
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    for visible in (mask, jnp.tri(*logits.shape[2:], dtype=bool) if is_causal else None):
        if visible is not None:
            logits = jnp.where(visible, logits, jnp.finfo(logits.dtype).min)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits, axis=-1), v)


def blocked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: Visible,
    block_rows: int = BLOCK_ROWS,
    most_ranges: int = MOST_RANGES,
) -> jax.Array:
    """Attention by the weights of one block of queries and one head of keys at a time, in O(T + S) memory.

    The backward pass recomputes a block's weights from the saved maxima of its rows. Neighbouring blocks
    share a range of keys. If `visible.offset` is an int, the range omits the keys after the blocks' last
    query (`is_causal`) and before the window of their first; otherwise every block reads all keys.

    Args:
      block_rows: t R, the rows of weights in a block.
      most_ranges: the most key ranges. With n ranges a causal square takes (n + 1) / 2n of the full square's
        products.
    """
    (batch, n_queries, n_heads, head_dim), (_, n_keys, n_kv_heads, _) = q.shape, k.shape
    n_shared = n_heads // n_kv_heads
    n_blocks = -(-n_queries // max(block_rows // n_shared, 1))
    block_len = -(-n_queries // n_blocks)
    n_padded, n_padded_keys = n_blocks * block_len, n_keys + MORE_KEYS

    query_ids, key_ids = visible.segment_ids or (None, None)
    positions = visible.offset + jnp.arange(n_padded, dtype=jnp.int32)
    if query_ids is not None:
        query_ids = _pad(query_ids, n_padded).reshape(-1, n_blocks, block_len).swapaxes(0, 1)
        key_ids = _pad(key_ids, n_padded_keys)
    blocks = _MaskInputs(positions.reshape(n_blocks, block_len), None, query_ids)
    real = jnp.ones((1, n_keys), bool) if visible.real is None else visible.real
    keys = _MaskInputs(jnp.arange(n_padded_keys, dtype=jnp.int32), _pad(real, n_padded_keys), key_ids)
    ranges = _key_ranges(visible, n_blocks, block_len, n_keys, most_ranges)

    def attend(head: tuple[jax.Array, jax.Array, jax.Array, tuple[_MaskInputs, _MaskInputs]]) -> jax.Array:
        """o [N, B, R, t, d] of q [N, B, R, t, d], and k and v [B, S, d]."""
        q, k, v, (blocks, keys) = head
        parts = []
        for first, last, start, stop in ranges:
            read = _MaskInputs(*(None if x is None else x[..., start:stop] for x in keys))
            attend_block = partial(_attend_block, k[:, start:stop], v[:, start:stop], read, visible)
            inputs = jax.tree.map(lambda x, block=slice(first, last): x[block], (q, blocks))
            parts.append(jax.lax.scan(attend_block, None, inputs)[1])
        return jnp.concatenate(parts)

    q = _pad(q, n_padded).reshape(batch, n_blocks, block_len, n_kv_heads, n_shared, head_dim)
    k, v = (_pad(x, n_padded_keys).transpose(2, 0, 1, 3) for x in (k, v))
    # One copy for each head: when JAX differentiates a loop, it hoists what no step changes out of the loop,
    # and would hold the masks of all blocks at once.
    tokens = jax.tree.map(lambda x: jnp.broadcast_to(x, (n_kv_heads, *x.shape)), (blocks, keys))
    o = jax.lax.map(attend, (q.transpose(3, 1, 0, 4, 2, 5), k, v, tokens))
    return o.transpose(2, 1, 4, 0, 3, 5).reshape(batch, n_padded, n_heads, head_dim)[:, :n_queries]


class _MaskInputs(NamedTuple):
    """What `_mask` compares: positions [n], `real` and segment ids [B or 1, n] or None."""

    positions: jax.Array
    real: jax.Array | None
    segment_ids: jax.Array | None


def _mask(queries: _MaskInputs, keys: _MaskInputs, is_causal: bool, window: int | None) -> jax.Array | None:
    """Boolean [B or 1, T, S], True where the key is visible; None if every key is."""
    distance = queries.positions[:, None] - keys.positions
    parts = []
    if is_causal:
        parts.append((distance >= 0)[None])
    if window is not None:
        parts.append((distance <= window)[None])
    if keys.real is not None:
        parts.append(keys.real[:, None])
    if queries.segment_ids is not None:
        parts.append(queries.segment_ids[:, :, None] == keys.segment_ids[:, None])
    return reduce(jnp.logical_and, parts) if parts else None


def _attend_block(
    k: jax.Array,
    v: jax.Array,
    keys: _MaskInputs,
    visible: Visible,
    carry: None,
    block: tuple[jax.Array, _MaskInputs],
) -> tuple[None, jax.Array]:
    """One step of a scan: o [B, R, t, d] of the block's q [B, R, t, d]."""
    q, queries = block
    o, total = _weighted_sum(q, k, v, queries, keys, visible.is_causal, visible.window)
    return carry, (o / total).astype(q.dtype)


@partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.save_only_these_names(ROW_MAXIMUM),
    static_argnums=(5, 6),
)
def _weighted_sum(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    queries: _MaskInputs,
    keys: _MaskInputs,
    is_causal: bool,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """sum_s e_s v_s [B, R, t, d] and sum_s e_s [B, R, t, 1], with e_s = exp(q . k_s / sqrt(d) - row maximum).

    The backward pass recomputes e_s. It also needs the two sums, which the caller's division saves.
    """
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    logits = jnp.einsum("brtd,bsd->brts", q, k, preferred_element_type=dtype) / q.shape[-1] ** 0.5
    mask = _mask(queries, keys, is_causal, window)
    logits = jnp.where(mask[:, None], logits, jnp.finfo(dtype).min)
    # The quotient does not depend on the maximum, so the maximum needs no gradient.
    largest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - checkpoint_name(largest, ROW_MAXIMUM))
    o = jnp.einsum("brts,bsd->brtd", weights.astype(v.dtype), v, preferred_element_type=dtype)
    return o, weights.sum(axis=-1, keepdims=True)


def _key_ranges(
    visible: Visible, n_blocks: int, block_len: int, n_keys: int, most_ranges: int
) -> list[tuple[int, int, int, int]]:
    """(first block, last + 1, first key, last + 1) of each range, with MORE_KEYS padded keys at its end."""
    if not visible.is_causal or not isinstance(visible.offset, int):
        return [(0, n_blocks, 0, n_keys + MORE_KEYS)]
    n_together = -(-n_blocks // most_ranges)
    ranges = []
    for first in range(0, n_blocks, n_together):
        last = min(first + n_together, n_blocks)
        start = 0 if visible.window is None else max(visible.offset + first * block_len - visible.window, 0)
        stop = min(visible.offset + last * block_len, n_keys)
        ranges.append((first, last, min(start, stop), stop + MORE_KEYS))
    return ranges


def _pad(x: jax.Array, length: int) -> jax.Array:
    """x [B, n, ...] with zeros up to `length`."""
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def same_segment(segment_ids: jax.Array) -> jax.Array:
    """Mask [B, 1, L, L] that is True where query and key carry the same id of segment_ids [B, L]."""
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def local_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int,
    real: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    method: Attention | None = None,
) -> jax.Array:
    """Attends with q [B, T, H, d] to the query's own key and the `window` keys before it, in O(T window).

    Args:
      k: keys [B, S, G, d]: up to `window` keys before the queries' own, then the T queries' own keys.
      v: values [B, S, G, d].
      window: at least 1. A query sees window + 1 keys, those with 0 <= query - key <= window.
      real: boolean [B or 1, S], False at keys that no query may see; None is everywhere True.
      segment_ids: integers [B or 1, S]; a query sees only keys of the same id. None is one segment.
      method: as in `softmax_attention`; with more than 2 window keys it is mapped over blocks of `window`
        queries.

    Returns:
      [B, T, H, d]. A query without a visible key gets some finite value.

    Raises:
      ValueError: if S is not in T..T + window.
    """
    batch, n_queries, n_keys = q.shape[0], q.shape[1], k.shape[1]
    if not n_queries <= n_keys <= n_queries + window:
        raise ValueError(f"k must have {n_queries} to {n_queries + window} keys, got {n_keys}")

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, real: jax.Array | None, segment_ids: jax.Array | None
    ) -> jax.Array:
        n_before = k.shape[1] - q.shape[1]
        ids = None if segment_ids is None else (segment_ids[:, n_before:], segment_ids)
        visible = Visible(True, window, n_before, real, ids)
        return (method or default_method())(q, k, v, visible)

    if n_keys <= 2 * window:  # two blocks or fewer would cost more than attending at once
        return attend(q, k, v, real, segment_ids)

    # Blocks of `window` queries, and a block of keys before the first: query block j sees only key blocks j
    # and j + 1.
    n_before = window - (n_keys - n_queries)
    n_after = -n_queries % window
    real = jnp.ones((1, n_keys), bool) if real is None else real

    def blocks(x: jax.Array, n_before: int) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (n_before, n_after)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, window, *x.shape[2:])

    def pairs(x: jax.Array) -> jax.Array:
        x = blocks(x, n_before)
        return jnp.concatenate([x[:, :-1], x[:, 1:]], axis=2)

    segment_ids = None if segment_ids is None else pairs(segment_ids)
    attend = jax.vmap(attend, in_axes=1, out_axes=1)
    o = attend(blocks(q, 0), pairs(k), pairs(v), pairs(real), segment_ids)
    return o.reshape(batch, -1, *q.shape[2:])[:, :n_queries]


def rotary(x: jax.Array, positions: jax.Array, n_turned: int, base: float, scaling: float = 1.0) -> jax.Array:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864), which make q_t . k_s depend on t - s.

    Of the first n = n_turned channels of a head, channels i and i + n/2, i < n/2, are rotated as a pair by
    the angle positions / scaling base^(-2i/n); the other channels stay.

    Args:
      x: queries or keys [B, T, H, d].
      positions: int [T].
      n_turned: an even number, at most d.
      scaling: by which positions are divided to extend a model's context (Chen et al. 2023, arXiv
        2306.15595).

    Returns:
      [B, T, H, d] in the dtype of x; computed in float32 (float64 stays float64).
    """
    dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    half = n_turned // 2
    frequencies = base ** (-jnp.arange(half, dtype=dtype) / half)
    angles = (positions.astype(dtype)[:, None] / scaling * frequencies)[:, None]  # [T, 1, n/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x1, x2 = x[..., :half].astype(dtype), x[..., half:n_turned].astype(dtype)
    turned = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., n_turned:]], axis=-1)
