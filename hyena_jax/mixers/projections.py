"""Dense layers whose output is used in parts. Axes: D channels in, C channels of a part."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Initializer

from hyena_jax.ops.dense import split_dense


class SplitDense(nn.Module):
    """x [..., D] -> `n_parts` arrays [..., C]: the columns of one kernel [D, n_parts C], in order.

    The parameters are those of `nn.Dense`; `hyena_jax.ops.dense.split_dense` says why there are parts.
    """

    features: int
    n_parts: int
    use_bias: bool = True
    dtype: jnp.dtype | None = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: jax.Array) -> list[jax.Array]:
        """The parts, in the order of the columns."""
        width = self.n_parts * self.features
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], width))
        bias = self.param("bias", self.bias_init, (width,)) if self.use_bias else None
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        parts = split_dense(x, kernel, self.n_parts)
        if bias is None:
            return list(parts)
        return [part + b for part, b in zip(parts, jnp.split(bias, self.n_parts), strict=True)]
