"""How a training step is distributed over devices and processes. Knows pytrees, not models."""

from collections.abc import Sequence

import jax

from hyena_jax.config import ParallelConfig
from hyena_jax.parallel.mesh import mesh_strategy
from hyena_jax.parallel.pmap import pmap_strategy
from hyena_jax.parallel.strategy import Strategy, all_devices


def make_strategy(config: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Strategy:
    """The strategy that `config` names, over its devices.

    Args:
      devices: those to choose from, which may be described only, not present; None: all that JAX has.

    Raises:
      UserError: if there are too few devices, or they do not fit the mesh.
    """
    chosen = all_devices(config.devices, devices)
    return mesh_strategy(config, chosen) if config.strategy == "sharded" else pmap_strategy(chosen)
