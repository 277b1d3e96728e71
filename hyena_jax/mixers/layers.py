"""Layers that act on each token by itself: dense layers and norms.

The dense layers have the parameters of `nn.Dense` and the products of `hyena_jax.ops.fast.dense`, which
explains the order of the axes and why a product is split into parts. Axes: B batch, L length, D channels (of
dense layers those in, and C those of a part), H heads of K channels.
"""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Initializer

from hyena_jax.config.models import NORM_EPS, Norm
from hyena_jax.mixers.inputs import sums_dtype
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.ops.fast.dense import from_channels_first, split_dense, to_channels_first
from hyena_jax.ops.initializers import initializers


class Embed(nn.Embed):
    """Flax's, rounded after the look-up: in bfloat16 the gradients of a frequent id would not add up."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        rows = jnp.take(self.embedding, inputs, axis=0)
        return rows.astype(self.dtype or rows.dtype)


class SplitDense(nn.Module):
    """x [..., D] -> `n_parts` arrays [..., C]: the columns of one kernel [D, n_parts C], in order."""

    features: int
    n_parts: int
    dtype: jnp.dtype | None = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> list[jax.Array]:
        x, kernel, bias = _parameters(self, x, x.shape[-1], self.n_parts * self.features)
        parts = split_dense(x, kernel, self.n_parts)
        if bias is None:
            return list(parts)
        return [part + b for part, b in zip(parts, jnp.split(bias, self.n_parts), strict=True)]


class ToChannelsFirst(SplitDense):
    """x [B, L, D] -> `n_parts` arrays [C, B, L]: the columns of one kernel [D, n_parts C], in order."""

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


def attention_layers(
    mixer: Mixer, width: int, qkv_bias: bool = True, out_bias: bool = True
) -> tuple[nn.Dense, nn.Dense]:
    """For `setup`: the dense layers to `width` channels of queries, keys and values, and of the output."""
    d_model, dense = mixer.d_model, partial(nn.Dense, dtype=mixer.dtype)
    init = initializers(mixer.config.init, mixer.n_layers, d_model, d_model)
    return (
        dense(width, qkv_bias, kernel_init=init.kernel, bias_init=init.bias),
        dense(d_model, out_bias, kernel_init=init.out_kernel, bias_init=init.out_bias),
    )


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (1 + scale) (Zhang and Sennrich 2019, arXiv 1910.07467).

    As in Griffin's released code, `scale` [D] starts at 0 and is added to 1, so that weight decay pulls the
    factor towards 1. StripedHyena's code has eps outside the root: x / (sqrt(mean(x^2)) + eps) * (1 + scale).

    Attributes:
      epsilon: added to the mean square, or to the root.
      dtype: of the result; None follows the input. The statistics are float32 at least.
      eps_outside: add epsilon to the root.
    """

    epsilon: float = 1e-6
    dtype: jnp.dtype | None = None
    eps_outside: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """y [..., D] of x [..., D]."""
        scale = self.param("scale", nn.initializers.zeros, (x.shape[-1],), jnp.float32)
        wide = x.astype(sums_dtype(x.dtype))
        mean_square = jnp.square(wide).mean(axis=-1, keepdims=True)
        if self.eps_outside:
            # The root has no derivative at 0, where y is x / eps.
            is_zero = mean_square == 0
            root = jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, mean_square)))
            inverse = 1 / (root + self.epsilon)
        else:
            inverse = jax.lax.rsqrt(mean_square + self.epsilon)
        y = wide * inverse * (1 + scale.astype(wide.dtype))
        return y.astype(self.dtype or x.dtype)


def make_norm(
    name: Norm, dtype: jnp.dtype | None, eps: float | None = None
) -> Callable[[jax.Array], jax.Array]:
    """The norm that a config names: a module, or the identity for `none`.

    Without `eps` it is that of NORM_EPS. Flax's LayerNorm computes its statistics in float32, too.
    """
    eps = NORM_EPS.get(name) if eps is None else eps
    match name:
        case "layer":
            return nn.LayerNorm(epsilon=eps, dtype=dtype)
        case "rms" | "rms_eps_outside":
            return RMSNorm(eps, dtype, name == "rms_eps_outside")
        case "none":
            return lambda x: x


class HeadLayerNorm(nn.Module):
    """LayerNorm over the K channels of each head of x [..., H, K], in its dtype; factor and bias [H K]."""

    epsilon: float
    scale_init: Initializer = nn.initializers.ones

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        heads, n_channels = x.shape[-2:], x.shape[-2] * x.shape[-1]
        scale = self.param("scale", self.scale_init, (n_channels,), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (n_channels,), jnp.float32)
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = jnp.square(centred).mean(axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.epsilon)
        return y * scale.astype(x.dtype).reshape(heads) + bias.astype(x.dtype).reshape(heads)


class GroupRMSNorm(nn.Module):
    """scale ⊙ x / sqrt(mean(x^2) + eps), the mean over each of `n_groups` groups of the channels.

    Parameters are [C] for x [..., C], and start at 1. Computed in the dtype of x.
    """

    n_groups: int
    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32).astype(x.dtype)
        groups = x.reshape(*x.shape[:-1], self.n_groups, -1)
        mean_square = jnp.square(groups).mean(axis=-1, keepdims=True)
        return scale * (groups * jax.lax.rsqrt(mean_square + self.epsilon)).reshape(x.shape)
