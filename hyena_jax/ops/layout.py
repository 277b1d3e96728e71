"""What a model's program is compiled for: a platform, and where arrays lie on its devices."""

from dataclasses import dataclass
from typing import Any

import jax

Tree = Any


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
