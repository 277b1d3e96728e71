"""Softmax attention: softmax(Q K^T / sqrt(d) + mask) V.

Axes: B batch, T queries, S keys, H heads, d head_dim.
"""

import jax
import jax.numpy as jnp


def softmax_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None, is_causal: bool = False
) -> jax.Array:
    """Attends with q [B, T, H, d] over k, v [B, S, H, d]; returns [B, T, H, d].

    Args:
      mask: boolean, broadcast to [B, H, T, S]; True where the key is visible.
      is_causal: query t sees keys s <= t (needs T = S).

    The softmax is computed in float32 whatever the dtype of q.
    """
    with jax.numpy_dtype_promotion("standard"):  # it mixes float32 logits and the inputs' dtype on purpose
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=is_causal)


def same_segment(segment_ids: jax.Array) -> jax.Array:
    """Mask [B, 1, L, L] that is True where query and key carry the same id of segment_ids [B, L]."""
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def visible_until(position: jax.Array, n_queries: int, n_keys: int, first: jax.Array) -> jax.Array:
    """Mask [B, 1, T, S] of a cache: query t at `position + t` sees keys first[b] <= s <= position + t."""
    keys = jnp.arange(n_keys)
    queries = position + jnp.arange(n_queries)
    return ((keys >= first[:, None, None]) & (keys <= queries[:, None]))[:, None]
