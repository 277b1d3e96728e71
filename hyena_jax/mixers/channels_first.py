"""The short FIR of mixers with long convolutions, channels first [C, B, L]."""

import jax
import jax.numpy as jnp

from hyena_jax.mixers.dense import FromChannelsFirst, ToChannelsFirst
from hyena_jax.ops.sequence_parallel import short_convolution
from hyena_jax.ops.sequence_shards import over_shards
from hyena_jax.ops.short_conv import advance_history, short_conv

__all__ = ["FromChannelsFirst", "ToChannelsFirst", "short_filtered"]


def short_filtered(
    parts: list[jax.Array],
    taps: jax.Array,
    bias: jax.Array,
    history: jax.Array | None,
    real: jax.Array | None = None,
    sequence_axis: str | None = None,
) -> tuple[list[jax.Array], jax.Array | None]:
    """Each part [W, B, T] through the short FIR of its channels, and the FIR's history after them.

    Args:
      taps: [C, K], tap 0 that of the current input; C channels are those of the parts in order.
      bias: [C].
      history: inputs before these [C, B, K-1], or None where there were none and none are to be kept.
      real: bool [B, T], False where the input is padding, which the filter sees as 0; None without padding.
      sequence_axis: where there is no history, the mesh axis over which T is shared out, or None.
    """
    if real is not None:
        parts = [jnp.where(real, part, 0) for part in parts]
    channels = jnp.split(taps, len(parts)), jnp.split(bias, len(parts))
    histories = [None] * len(parts) if history is None else jnp.split(history, len(parts))
    outputs, after = [], []
    for part, part_taps, part_bias, before in zip(parts, *channels, histories, strict=True):
        part_taps, part_bias = part_taps.T[..., None, None], part_bias[:, None, None]
        if before is None and sequence_axis is not None:
            outputs.append(_over_devices(part, part_taps, part_bias, sequence_axis))
        else:
            outputs.append(short_conv(part, part_taps, part_bias, -1, before))
        after.append(advance_history(before, part, -1))
    return outputs, None if history is None else jnp.concatenate(after)


def _over_devices(part: jax.Array, taps: jax.Array, bias: jax.Array, sequence_axis: str) -> jax.Array:
    """part [W, B, T] through the FIR, taps [K, W, 1, 1] and bias [W, 1, 1]; T is shared out."""

    def local(part: jax.Array, taps: jax.Array, bias: jax.Array) -> jax.Array:
        return short_convolution(part, taps, bias, None, -1, sequence_axis)

    return over_shards(local, sequence_axis, ("WBL", "KW11", "W11"), "WBL")(part, taps, bias)
