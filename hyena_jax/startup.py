"""Before a command computes: a JAX that computes wrong values is refused."""

import importlib.metadata
import os

from hyena_jax.config.checks import UserError

# The fault is XLA's, so jaxlib's: under jax 0.10.2, jaxlib 0.10.1 is right.
MISCOMPILES_ON_CPUS = "0.10.2"


def refuse_wrong_jaxlib() -> None:
    """Raises UserError if this jaxlib miscompiles and may run on a CPU.

    A CPU is assumed unless JAX_PLATFORMS names an accelerator first: to ask JAX would start its backends,
    which must not happen before several processes have joined.
    """
    version = importlib.metadata.version("jaxlib")
    platform = os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    if version == MISCOMPILES_ON_CPUS and platform in ("", "cpu"):
        raise UserError(
            f"jaxlib {version} computes wrong values on CPUs (jax-ml/jax#39103); install another version: "
            "pip install jax==0.10.1, or pip install --upgrade jax on Python 3.12 and newer "
            "(on an accelerator, JAX_PLATFORMS=cuda or JAX_PLATFORMS=tpu lets this one run)"
        )
