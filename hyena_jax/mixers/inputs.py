"""Checks and masks of the mixers' inputs, and the part of a state that the batch shares."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.system.errors import require


class Shared(NamedTuple):
    """What all rows of a state share: the number of tokens seen, int32 [], and what is computed once."""

    position: jax.Array
    constants: dict[str, Any] = {}  # noqa: RUF012 - a pytree is never changed in place


def check_input(x: jax.Array, d_model: int, max_len: int, segment_ids: jax.Array | None = None) -> None:
    """Raises ValueError unless x is [B, L, d_model] with L in 1..max_len, and segment_ids integers [B, L]."""
    require(x.ndim == 3, "x", x.shape, "of rank 3, [B, L, D]")
    require(x.shape[2] == d_model, "x.shape[2]", x.shape[2], f"d_model={d_model}")
    require(len(x) >= 1, "batch size", 0, "at least 1")
    require(1 <= x.shape[1] <= max_len, "sequence length", x.shape[1], f"in 1..max_len={max_len}")
    if segment_ids is not None:
        shape, dtype = segment_ids.shape, segment_ids.dtype
        require(shape == x.shape[:2], "segment_ids.shape", shape, f"[B, L] = {x.shape[:2]}")
        require(jnp.issubdtype(dtype, jnp.integer), "segment_ids.dtype", str(dtype), "an integer type")


def check_next(
    x: jax.Array, d_model: int, max_len: int, batch_size: int, lengths: jax.Array | None = None
) -> jax.Array | None:
    """`check_input` for the next tokens of a state of `batch_size` rows; returns the lengths as int32 [B]."""
    check_input(x, d_model, max_len)
    require(len(x) == batch_size, "batch size", len(x), f"the state's {batch_size}")
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    require(lengths.shape == (batch_size,), "lengths.shape", lengths.shape, f"[B] = ({batch_size},)")
    is_integer = jnp.issubdtype(lengths.dtype, jnp.integer)
    require(is_integer, "lengths.dtype", str(lengths.dtype), "an integer type")
    return lengths.astype(jnp.int32)


def check_token(x: jax.Array, d_model: int, batch_size: int) -> None:
    """Raises ValueError unless x is one token for each row of a state, [B, d_model]."""
    require(x.shape == (batch_size, d_model), "x", x.shape, f"[B, D] = ({batch_size}, {d_model})")


def check_state_length(length: int, max_len: int) -> None:
    """Raises ValueError unless a state of `length` tokens fits the model."""
    require(1 <= length <= max_len, "max_len of the state", length, f"in 1..max_len={max_len}")


def is_real(lengths: jax.Array | None, n_tokens: int) -> jax.Array | None:
    """Mask [B, T], True at the last lengths[b] tokens of each row; None where every token is real."""
    if lengths is None:
        return None
    return jnp.arange(n_tokens) >= n_tokens - jnp.asarray(lengths)[:, None]


def within(y: jax.Array, end: jax.Array, room: int) -> jax.Array:
    """y, or NaN if its last token is number `end` [] of a state with `room`: a traced number cannot raise."""
    return jnp.where(end <= room, y, jnp.nan)


def masked(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """x [B, T, D] with 0 in place of padding; see `is_real`."""
    real = is_real(lengths, x.shape[1])
    return x if real is None else jnp.where(real[..., None], x, 0)


def refuse_segments(segment_ids: jax.Array | None) -> None:
    """Raises ValueError for segment_ids: the mixer would mix across document boundaries."""
    given = None if segment_ids is None else segment_ids.shape
    must = "None: this mixer would mix across the boundaries of documents"
    require(segment_ids is None, "segment_ids", given, must)


def sums_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of sums and recurrences over arrays of `dtype`: float32, or float64 for float64."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
