"""How a training step is distributed over devices and processes. Knows pytrees, not models."""

from hyena_jax.config import ParallelConfig
from hyena_jax.parallel.mesh import mesh_strategy
from hyena_jax.parallel.pmap import pmap_strategy
from hyena_jax.parallel.strategy import Strategy


def make_strategy(config: ParallelConfig) -> Strategy:
    """The strategy that `config` names, over its devices.

    Raises:
      UserError: if there are too few devices, or they do not fit the mesh.
    """
    return mesh_strategy(config) if config.strategy == "sharded" else pmap_strategy(config)
