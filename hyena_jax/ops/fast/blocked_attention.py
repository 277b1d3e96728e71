"""Softmax attention block by block: O(T + S) memory, and on CPUs less time.

Axes: as in `ops.attention`; N blocks of t queries each.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hyena_jax.ops.attention import MaskInputs, Visible, mask_of, plain_attention

# Rows of weights (t R) in a block of `blocked_attention`, and the most key ranges, each compiled once.
BLOCK_ROWS = 256
MAX_RANGES = 8
# XLA for CPUs transposes the weights [t, S] of a block for the gradients of keys and values. If S is a power
# of two that takes twice as long: the rows compete for the same cache lines. Padding the keys avoids it.
MORE_KEYS = 16

ROW_MAXIMUM = "attention_row_maximum"


def cpu_attention(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible) -> jax.Array:
    """`blocked_attention` for more than BLOCK_ROWS queries, `plain_attention` for fewer."""
    return (blocked_attention if q.shape[1] > BLOCK_ROWS else plain_attention)(q, k, v, visible)


def blocked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: Visible,
    block_rows: int = BLOCK_ROWS,
    most_ranges: int = MAX_RANGES,
) -> jax.Array:
    """Attention by the weights of one block of queries and one head of keys at a time, in O(T + S) memory.

    The backward pass recomputes a block's weights from the saved maxima of its rows. Neighbouring blocks
    share a range of keys. If `visible.offset` is an int, the range omits the keys after the blocks' last
    query (`is_causal`) and before the window of their first; otherwise every block reads all keys.

    A block has `block_rows` = t R rows of weights. With n <= `most_ranges` ranges of keys a causal square
    takes (n + 1) / 2n of the full square's products.
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
    blocks = MaskInputs(positions.reshape(n_blocks, block_len), None, query_ids)
    real = jnp.ones((1, n_keys), bool) if visible.real is None else visible.real
    keys = MaskInputs(jnp.arange(n_padded_keys, dtype=jnp.int32), _pad(real, n_padded_keys), key_ids)
    ranges = _key_ranges(visible, n_blocks, block_len, n_keys, most_ranges)

    def attend(head: tuple[jax.Array, jax.Array, jax.Array, tuple[MaskInputs, MaskInputs]]) -> jax.Array:
        """o [N, B, R, t, d] of q [N, B, R, t, d], and k and v [B, S, d]."""
        q, k, v, (blocks, keys) = head
        parts = []
        for first, last, start, stop in ranges:
            read = MaskInputs(*(None if x is None else x[..., start:stop] for x in keys))
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


def _attend_block(
    k: jax.Array,
    v: jax.Array,
    keys: MaskInputs,
    visible: Visible,
    carry: None,
    block: tuple[jax.Array, MaskInputs],
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
    queries: MaskInputs,
    keys: MaskInputs,
    is_causal: bool,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """sum_s e_s v_s [B, R, t, d] and sum_s e_s [B, R, t, 1], with e_s = exp(q . k_s / sqrt(d) - row maximum).

    The backward pass recomputes e_s. It also needs the two sums, which the caller's division saves.
    """
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    logits = jnp.einsum("brtd,bsd->brts", q, k, preferred_element_type=dtype) / q.shape[-1] ** 0.5
    mask = mask_of(queries, keys, is_causal, window)
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
