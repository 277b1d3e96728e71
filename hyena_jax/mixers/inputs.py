"""What every mixer checks and masks in its input."""

import jax
import jax.numpy as jnp

from hyena_jax.config import MixerConfig, require


def check_input(x: jax.Array, d_model: int, max_len: int) -> None:
    """Raises ValueError unless x is [B, L, d_model] with L in 1..max_len."""
    require(x.ndim == 3, "x", x.shape, "of rank 3, [B, L, D]")
    require(x.shape[2] == d_model, "x.shape[2]", x.shape[2], f"d_model={d_model}")
    require(1 <= x.shape[1] <= max_len, "sequence length", x.shape[1], f"in 1..max_len={max_len}")


def check_state_length(length: int, max_len: int) -> None:
    """Raises ValueError unless a state of `length` tokens fits the model."""
    require(1 <= length <= max_len, "max_len of the state", length, f"in 1..max_len={max_len}")


def is_real(lengths: jax.Array | None, n_tokens: int) -> jax.Array | None:
    """Mask [B, T], True at the last lengths[b] tokens of each row; None where every token is real."""
    if lengths is None:
        return None
    return jnp.arange(n_tokens) >= n_tokens - lengths[:, None]


def check_causal(config: MixerConfig) -> None:
    """Raises ValueError for a mixer whose outputs depend on later inputs: it has no decoding state."""
    require(config.causal, "mixer", type(config).__name__, "causal to decode")


def refuse_segments(segment_ids: jax.Array | None) -> None:
    """Raises ValueError for document boundaries, which a mixer would leak across."""
    given = None if segment_ids is None else segment_ids.shape
    require(segment_ids is None, "segment_ids", given, "None: a long filter crosses document boundaries")
