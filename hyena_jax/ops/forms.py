"""What a model's program is compiled for, and which form of an operator runs there: one place decides.

Axes: B batch, L length, D channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from hyena_jax.ops import attention, linear_recurrence, long_conv
from hyena_jax.ops.attention import Attention
from hyena_jax.ops.delta_rule import DeltaRule, delta_rule
from hyena_jax.ops.fast.blocked_attention import cpu_attention
from hyena_jax.ops.fast.matmul_fft import matmul_fft_conv
from hyena_jax.ops.linear_recurrence import Recurrence
from hyena_jax.ops.long_conv import Convolution

Tree = Any
TOEPLITZ_LEN = 128
"""The longest L for which a TPU takes one product with a matrix [L, L]: one tile of its matrix unit."""
FUSED_LEN = 8192
"""The longest L for which a TPU takes one kernel; its FFT over rows is unrolled: the program grows with L."""


@dataclass(frozen=True)
class Layout:
    """The devices that a model's program is compiled for: this class leaves everything to XLA.

    Attributes:
      platform: "cpu", "gpu" or "tpu", for which operators choose their forms; None is JAX's default backend
        when an operator is traced.
      row_shards: number of equal parts of a batch's rows, on as many devices.
      kernels: whether operators take the platform's Pallas kernels.
    """

    platform: str | None = None
    row_shards: int = 1
    kernels: bool = False

    @property
    def gathers(self) -> bool:
        """Whether parameters are sharded, so that `gather` has something to do."""
        return False

    @property
    def random_bits(self) -> str | None:
        """Generator of dropout's bits: on TPUs the chip's, nearly free, with other masks than Threefry's."""
        return "rbg" if self.platform == "tpu" else None

    def pin(self, x: jax.Array) -> jax.Array:
        """Activations [B, L, D], with rows and length kept on the devices that hold the batch's."""
        return x

    def gather(self, params: Tree) -> Tree:
        """Parameters, whole on every device; their gradients return to where the parameters lie."""
        return params


class Forms(NamedTuple):
    """The form of each operator that has several; all forms of an operator compute the same."""

    convolution: Convolution
    recurrence: Recurrence
    attention: Attention
    delta_rule: DeltaRule
    keep: Callable[[jax.Array], jax.Array] = lambda x: x
    """Returns x; on a CPU, XLA then writes x to memory, where it would compute x again for each reader."""


def forms_for(platform: str | None = None, kernels: bool = False) -> Forms:
    """The forms for a platform, "cpu", "gpu" or "tpu", at any length; None is JAX's default backend.

    On a CPU these are the fastest that we measured. Of convolutions, forward alone, `toeplitz_conv` is faster
    than `fft_conv` up to L = 64 (0.6 to 0.8 of the time), but with the backward pass slower from 32 on;
    `matmul_fft_conv` takes 2 to 4 times as long. `loop_recurrence` takes 0.4 to 0.9 of the time of
    `scan_recurrence` and 0.2 to 0.6 of `associative_recurrence`, from L = 64 to 131,072 (two cores). On a GPU
    and a TPU nothing is measured yet.

    `kernels` takes the platform's Pallas kernels (see `kernels.check`). The recurrence's have only reverse
    mode; they and the delta rule's are not taken under x64.
    """
    platform = platform or jax.default_backend()
    if platform == "cpu":
        return Forms(
            long_conv.fft_conv,
            linear_recurrence.loop_recurrence,
            cpu_attention,
            delta_rule,
            jax.lax.optimization_barrier,
        )
    convolution = long_conv.fft_conv
    if platform == "tpu":
        convolution = tpu_conv if kernels else tpu_products
    recurrence = linear_recurrence.associative_recurrence
    if kernels and platform in ("gpu", "tpu") and not jax.config.jax_enable_x64:
        from hyena_jax.ops.kernels.recurrence import gpu_recurrence, tpu_recurrence  # Pallas imports slowly

        recurrence = gpu_recurrence if platform == "gpu" else tpu_recurrence
    rule = delta_rule
    if kernels and platform == "tpu" and not jax.config.jax_enable_x64:
        from hyena_jax.ops.kernels.delta_rule import fused_delta_rule

        rule = fused_delta_rule
    return Forms(convolution, recurrence, attention.plain_attention, rule)


def tpu_products(u: jax.Array, h: jax.Array) -> jax.Array:
    """y = h * u by products of matrices: `toeplitz_conv`, and `matmul_fft_conv` beyond."""
    return (long_conv.toeplitz_conv if u.shape[-1] <= TOEPLITZ_LEN else matmul_fft_conv)(u, h)


def tpu_conv(u: jax.Array, h: jax.Array, precision: str = "highest") -> jax.Array:
    """y = h * u as `tpu_products`, but for middle lengths as one kernel, `fused_conv`.

    The kernel takes u [..., C, B, L] with h [C, 1, L] in float32; other shapes go to `matmul_fft_conv`. Its
    `precision` "high" has relative errors of about 1e-5, and half the products.
    """
    if not TOEPLITZ_LEN < u.shape[-1] <= FUSED_LEN:
        return tpu_products(u, h)
    from hyena_jax.ops.kernels.long_conv import fused_conv  # Pallas imports slowly

    return fused_conv(u, h, precision)
