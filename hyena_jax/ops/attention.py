"""Softmax attention softmax(Q K^T / sqrt(d) + mask) V, over all keys or a window, and rotary positions.

Axes: B batch, T queries, S keys, L either where T = S, H heads, G heads of keys and values, R = H/G query
heads that share one, N blocks of t queries each, d head_dim. Query head h attends with key head h // R.
`B or 1` is 1 where the rows do not differ.

Every form computes the softmax in float32 (float64 stays), gives a query that sees no key some finite value,
and is differentiable in forward and reverse mode, any number of times.
"""

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp


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
# of q.
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
      is_causal, real, segment_ids: as in `Visible`.
      offset: as in `Visible`; an int lets `blocked_attention` skip keys that come later.
      method: `plain_attention`, `fast.blocked_attention.blocked_attention`, or another function of this kind;
        None is the `attention` of `ops.forms.forms_for()`.

    >>> q, k, v = jnp.zeros((1, 3, 2, 4)), jnp.zeros((1, 3, 1, 4)), jnp.arange(12.0).reshape(1, 3, 1, 4)
    >>> softmax_attention(q, k, v, is_causal=True)[0, :, 0, 0].tolist()  # equal weights: running means
    [0.0, 2.0, 4.0]
    """
    visible = Visible(is_causal, None, offset, real, segment_ids)
    return (method or _default())(q, k, v, visible)


def _default() -> Attention:
    from hyena_jax.ops.forms import forms_for  # which imports this module

    return forms_for().attention


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible) -> jax.Array:
    """q [B, T, H, d] attends over k, v [B, S, G, d] by all weights [B, H, T, S], with JAX's own function."""
    n_queries, n_keys = q.shape[1], k.shape[1]
    starts_level = isinstance(visible.offset, int) and visible.offset == 0
    is_triangle = visible.is_causal and starts_level and n_queries == n_keys  # as the library means is_causal
    query_ids, key_ids = visible.segment_ids or (None, None)
    queries = MaskInputs(visible.offset + jnp.arange(n_queries, dtype=jnp.int32), None, query_ids)
    keys = MaskInputs(jnp.arange(n_keys, dtype=jnp.int32), visible.real, key_ids)
    mask = mask_of(queries, keys, visible.is_causal and not is_triangle, visible.window)
    mask = None if mask is None else mask[:, None]
    if q.dtype == jnp.float64:  # the library's softmax would round it to float32
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        logits = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        for seen in (mask, jnp.tri(*logits.shape[2:], dtype=bool) if is_triangle else None):
            if seen is not None:
                logits = jnp.where(seen, logits, jnp.finfo(logits.dtype).min)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits, axis=-1), v)
    with jax.numpy_dtype_promotion("standard"):  # it mixes float32 logits and the inputs' dtype on purpose
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=is_triangle)


class MaskInputs(NamedTuple):
    """What `mask_of` compares: positions [n], `real` and segment ids [B or 1, n] or None."""

    positions: jax.Array
    real: jax.Array | None
    segment_ids: jax.Array | None


def mask_of(queries: MaskInputs, keys: MaskInputs, is_causal: bool, window: int | None) -> jax.Array | None:
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
      k, v: [B, S, G, d]: up to `window` keys before the queries' own, then the T queries' own keys; another S
        raises ValueError.
      window: at least 1. A query sees window + 1 keys, those with 0 <= query - key <= window.
      real: as in `Visible`.
      segment_ids: integers [B or 1, S] of the keys; a query sees only keys of its own key's id.
      method: as in `softmax_attention`; with more than 2 window keys it is mapped over blocks of `window`
        queries.
    """
    batch, n_queries, n_keys = q.shape[0], q.shape[1], k.shape[1]
    if not n_queries <= n_keys <= n_queries + window:
        raise ValueError(f"k must have {n_queries} to {n_queries + window} keys, got {n_keys}")
    attention = method or _default()

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, real: jax.Array | None, segment_ids: jax.Array | None
    ) -> jax.Array:
        n_before = k.shape[1] - q.shape[1]
        ids = None if segment_ids is None else (segment_ids[:, n_before:], segment_ids)
        visible = Visible(True, window, n_before, real, ids)
        return attention(q, k, v, visible)

    if n_keys <= 2 * window:  # two blocks or fewer would cost more than attending at once
        return attend(q, k, v, real, segment_ids)

    # Blocks of `window` queries, and a block of keys before the first: block j sees key blocks j and j + 1.
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
    the angle positions / scaling base^(-2i/n); the other channels stay. Computed in float32 (float64 stays).

    Args:
      x: queries or keys [B, T, H, d]; the result has their shape and dtype.
      positions: int [T].
      n_turned: an even number, at most d.
      scaling: divides positions, to extend a model's context (Chen et al. 2023, arXiv 2306.15595).
    """
    dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    half = n_turned // 2
    frequencies = base ** (-jnp.arange(half, dtype=dtype) / half)
    angles = (positions.astype(dtype)[:, None] / scaling * frequencies)[:, None]  # [T, 1, n/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x1, x2 = x[..., :half].astype(dtype), x[..., half:n_turned].astype(dtype)
    turned = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., n_turned:]], axis=-1)
