"""Dense layers with the parameters of `nn.Dense` and the products of `hyena_jax.ops.fast.dense`.

`ops.fast.dense` explains the order of the axes and why the product is split into parts. Axes: B batch, L
length, D channels in, C channels of a part.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Initializer

from hyena_jax.ops.fast.dense import from_channels_first, split_dense, to_channels_first


class SplitDense(nn.Module):
    """x [..., D] -> `n_parts` arrays [..., C]: the columns of one kernel [D, n_parts C], in order."""

    features: int
    n_parts: int
    use_bias: bool = True
    dtype: jnp.dtype | None = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: jax.Array) -> list[jax.Array]:
        x, kernel, bias = _parameters(self, x, x.shape[-1], self.n_parts * self.features)
        parts = split_dense(x, kernel, self.n_parts)
        if bias is None:
            return list(parts)
        return [part + b for part, b in zip(parts, jnp.split(bias, self.n_parts), strict=True)]


class ToChannelsFirst(nn.Module):
    """x [B, L, D] -> `n_parts` arrays [C, B, L]: the columns of one kernel [D, n_parts C], in order."""

    features: int
    n_parts: int
    dtype: jnp.dtype | None = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> list[jax.Array]:
        x, kernel, bias = _parameters(self, x, x.shape[-1], self.n_parts * self.features)
        parts = to_channels_first(x, kernel, self.n_parts)
        if bias is None:
            return list(parts)
        biases = jnp.split(bias, self.n_parts)
        return [part + b[:, None, None] for part, b in zip(parts, biases, strict=True)]


class FromChannelsFirst(nn.Module):
    """x [D, B, L] -> y [B, L, C]."""

    features: int
    dtype: jnp.dtype | None = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x, kernel, bias = _parameters(self, x, x.shape[0], self.features)
        y = from_channels_first(x, kernel)
        return y if bias is None else y + bias


def _parameters(
    layer: nn.Module, x: jax.Array, d_in: int, d_out: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """x, the layer's kernel [d_in, d_out] and its bias [d_out] or None, in the dtype of the product."""
    kernel = layer.param("kernel", layer.kernel_init, (d_in, d_out), jnp.float32)
    bias = layer.param("bias", layer.bias_init, (d_out,), jnp.float32) if layer.use_bias else None
    return promote_dtype(x, kernel, bias, dtype=layer.dtype)
