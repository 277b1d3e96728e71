"""What a model's program is compiled for: a platform, and a mesh that holds activations and parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Tree = Any


def _as_it_is(x: Any) -> Any:
    return x


class Layout(NamedTuple):
    """The devices that a model's program is compiled for. The default leaves everything to XLA.

    Attributes:
      platform: "cpu", "gpu" or "tpu", for which operators choose their forms; None is JAX's default backend
        when an operator is traced.
      row_shards: number of equal parts of a batch's rows, on as many devices.
      pin: activations [B, L, D] -> the same, with rows and length kept on the devices that hold the batch's.
      gather: parameters -> the same, whole on every device; their gradients return to where the parameters
        lie.
      kernels: whether operators take the platform's Pallas kernels.
    """

    platform: str | None = None
    row_shards: int = 1
    pin: Callable[[jax.Array], jax.Array] = _as_it_is
    gather: Callable[[Tree], Tree] = _as_it_is
    kernels: bool = False

    @property
    def gathers(self) -> bool:
        """Whether parameters are anywhere but whole on every device."""
        return self.gather is not _as_it_is
