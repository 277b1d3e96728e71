"""What stands between a model's activations [B, L, D] and a long convolution's channels first [C, B, L].

The parameters are those of `nn.Dense`; `hyena_jax.ops.dense` says what the order of axes is for.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Initializer

from hyena_jax.ops.dense import from_channels_first, to_channels_first


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
