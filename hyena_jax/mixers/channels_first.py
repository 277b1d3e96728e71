"""What stands between a model's activations [B, L, D] and a long convolution's channels first [C, B, L].

The parameters are those of `nn.Dense`; `hyena_jax.ops.dense` says what the order of axes is for.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Initializer

from hyena_jax.ops.dense import from_channels_first, to_channels_first
from hyena_jax.ops.sequence_parallel import short_convolution
from hyena_jax.ops.sequence_shards import over_shards
from hyena_jax.ops.short_conv import advance_history, short_conv


class ToChannelsFirst(nn.Module):
    """x [B, L, D] -> `n_parts` arrays [C, B, L]: the columns of one kernel [D, n_parts C], in order."""

    features: int
    n_parts: int
    dtype: jnp.dtype | None = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: jax.Array) -> list[jax.Array]:
        """The parts, in the order of the columns."""
        width = self.n_parts * self.features
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], width))
        bias = self.param("bias", self.bias_init, (width,))
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        parts, biases = to_channels_first(x, kernel, self.n_parts), jnp.split(bias, self.n_parts)
        return [part + b[:, None, None] for part, b in zip(parts, biases, strict=True)]


class FromChannelsFirst(nn.Module):
    """x [C, B, L] -> y [B, L, D]."""

    features: int
    dtype: jnp.dtype | None = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """y [B, L, D]."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[0], self.features))
        bias = self.param("bias", self.bias_init, (self.features,))
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        return from_channels_first(x, kernel) + bias


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
