"""How a training step is distributed over devices and processes. Knows pytrees, not models."""

from collections.abc import Sequence

import jax

from hyena_jax.config import ParallelConfig
from hyena_jax.ops.kernels.check import fault as kernel_fault
from hyena_jax.parallel.pmap import Pmap
from hyena_jax.parallel.processes import gather
from hyena_jax.parallel.sharded import Sharded
from hyena_jax.parallel.strategy import Strategy, all_devices
from hyena_jax.system.errors import UserError

HAVE_KERNELS = ("gpu", "tpu")
"""The platforms with Pallas kernels."""


def make_strategy(config: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Strategy:
    """The strategy that `config` names, over its devices; refuses kernels `on` where they do not run.

    `devices` are those to choose from, which may be described only, not present; None: all that JAX has.
    """
    chosen = all_devices(config.devices, devices)
    platform = chosen[0].platform
    if config.kernels == "on" and platform not in HAVE_KERNELS:
        raise UserError(
            f"must be 'off' or 'auto' on a {platform}, which has none; got 'on'", "parallel.kernels"
        )
    kernels = wants_kernels(config, platform)
    if kernels and devices is None:
        faults = gather(kernel_fault(platform))
        fault = next((found for found in faults if found is not None), None)
        if fault is not None and config.kernels == "on":
            raise UserError(f"must be 'off' or 'auto' on these devices: {fault}", "parallel.kernels")
        kernels = fault is None
    return Sharded(config, chosen, kernels) if config.strategy == "sharded" else Pmap(chosen, kernels)


def wants_kernels(config: ParallelConfig, platform: str) -> bool:
    """Whether `config` asks for the Pallas kernels of a platform, which then has to pass their check."""
    is_default = config.kernels == "auto" and platform == "tpu"
    return platform in HAVE_KERNELS and (config.kernels == "on" or is_default)
