"""Documents that share a row: the runs of equal ids in it. Axes: B batch, L length."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Documents(NamedTuple):
    """For each token, [B, L]: its document's number in the row, its position in that, both int32 from 0,
    and whether a new document begins there, except at the first token of a row."""

    number: jax.Array
    position: jax.Array
    changes: jax.Array


def documents(segment_ids: jax.Array) -> Documents:
    """The documents of segment_ids, integers [B, L]; an id that returns later is another document."""
    changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    start = jax.lax.cummax(jnp.where(changes, index, 0), axis=1)
    return Documents(jnp.cumsum(changes, axis=1, dtype=jnp.int32), index - start, changes)
