"""Softmax attention: softmax(Q K^T / sqrt(d) + mask) V, in full and in a window, and rotary positions.

Axes: B batch, T queries, S keys, L either where T = S, H heads, G heads of keys and values, d head_dim. G
divides H; query head h attends with key head h // (H/G). `B or 1` is 1 where the rows do not differ.
"""

import jax
import jax.numpy as jnp


def softmax_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None, is_causal: bool = False
) -> jax.Array:
    """Attends with q [B, T, H, d] over k, v [B, S, G, d]; returns [B, T, H, d].

    Args:
      mask: boolean, broadcast to [B, H, T, S]; True where the key is visible. A query without any gets
        some finite value.
      is_causal: query t sees keys s <= t (needs T = S).

    The softmax is computed in float32 (float64 stays float64).
    """
    if q.dtype == jnp.float64:  # the library's softmax would round it to float32
        return _attention_in_float64(q, k, v, mask, is_causal)
    with jax.numpy_dtype_promotion("standard"):  # it mixes float32 logits and the inputs' dtype on purpose
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=is_causal)


def _attention_in_float64(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, is_causal: bool
) -> jax.Array:
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    for visible in (mask, jnp.tri(*logits.shape[2:], dtype=bool) if is_causal else None):
        if visible is not None:
            logits = jnp.where(visible, logits, jnp.finfo(logits.dtype).min)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits, axis=-1), v)


def same_segment(segment_ids: jax.Array) -> jax.Array:
    """Mask [B, 1, L, L] that is True where query and key carry the same id of segment_ids [B, L]."""
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def visible_until(position: jax.Array, n_queries: int, n_keys: int, first: jax.Array) -> jax.Array:
    """Mask [B, 1, T, S] of a cache: query t at `position + t` sees keys first[b] <= s <= position + t."""
    keys = jnp.arange(n_keys, dtype=jnp.int32)
    queries = position + jnp.arange(n_queries, dtype=jnp.int32)
    return ((keys >= first[:, None, None]) & (keys <= queries[:, None]))[:, None]


def local_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int,
    real: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Attends with q [B, T, H, d] to the current key and the `window` keys before it, in O(T window).

    Args:
      k: keys [B, S, G, d]: up to `window` that precede the queries, then the T keys of the queries.
      v: values [B, S, G, d].
      window: a key is visible when 0 <= query - key <= window; at least 1.
      real: boolean [B or 1, S], False at keys that nobody may see; None is everywhere True.
      segment_ids: integers [B or 1, S]; a query sees only keys of its own id. None is one segment.

    Returns:
      [B, T, H, d]. A query without a visible key gets some finite value.

    Raises:
      ValueError: if S is not in T..T + window.
    """
    batch, n_queries, n_keys = q.shape[0], q.shape[1], k.shape[1]
    if not n_queries <= n_keys <= n_queries + window:
        raise ValueError(f"keys must number {n_queries}..{n_queries + window}, got {n_keys}")
    real = jnp.ones((1, n_keys), bool) if real is None else real
    segment_ids = jnp.zeros((1, n_keys), jnp.int32) if segment_ids is None else segment_ids
    if n_keys <= 2 * window:  # two blocks or less would cost more than the whole
        return _attend_in_window(q, k, v, window, real, segment_ids)

    # Blocks of `window` queries, and a block of keys before the first: what query block j sees lies in key
    # blocks j and j + 1.
    n_before = window - (n_keys - n_queries)
    n_after = -n_queries % window

    def blocks(x: jax.Array, n_before: int) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (n_before, n_after)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, window, *x.shape[2:])

    def pairs(x: jax.Array) -> jax.Array:
        x = blocks(x, n_before)
        return jnp.concatenate([x[:, :-1], x[:, 1:]], axis=2)

    attend = jax.vmap(_attend_in_window, in_axes=(1, 1, 1, None, 1, 1), out_axes=1)
    o = attend(blocks(q, 0), pairs(k), pairs(v), window, pairs(real), pairs(segment_ids))
    return o.reshape(batch, -1, *q.shape[2:])[:, :n_queries]


def _attend_in_window(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int, real: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """`local_attention` by a mask [B or 1, 1, T, S]."""
    n_before = k.shape[1] - q.shape[1]
    distance = n_before + jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    same = segment_ids[:, n_before:, None] == segment_ids[:, None]
    mask = (distance >= 0) & (distance <= window) & real[:, None] & same
    return softmax_attention(q, k, v, mask[:, None])


def rotary(x: jax.Array, positions: jax.Array, n_turned: int, base: float) -> jax.Array:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864): q_t . k_s comes to depend on t - s.

    Channels i and i + n/2 of the first n = n_turned channels of a head, i < n/2, are turned as a pair by the
    angle positions base^(-2i/n); the other channels stay.

    Args:
      x: queries or keys [B, T, H, d].
      positions: int [T].
      n_turned: an even number, at most d.

    Returns:
      [B, T, H, d] in the dtype of x; computed in float32 (float64 stays float64).
    """
    dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    half = n_turned // 2
    frequencies = base ** (-jnp.arange(half, dtype=dtype) / half)
    angles = (positions.astype(dtype)[:, None] * frequencies)[:, None]  # [T, 1, n/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x1, x2 = x[..., :half].astype(dtype), x[..., half:n_turned].astype(dtype)
    turned = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., n_turned:]], axis=-1)
