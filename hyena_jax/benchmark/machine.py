"""The machine and versions behind measured numbers, and the machine's measured limits."""

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.benchmark.timing import interleave
from hyena_jax.system.files import n_cpus

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax")

# Rows of the square matrices, and bytes of the array: far beyond any cache, and quick enough to repeat.
MATMUL_SIZE = {"cpu": 2048}
COPY_BYTES = {"cpu": 2**28}
ACCELERATOR_MATMUL_SIZE, ACCELERATOR_COPY_BYTES = 8192, 2**31
BUDGET, LEAST_RUNS = 1.0, 5


class Roofline(NamedTuple):
    """FLOP/s of a matrix product in a dtype, and bytes/s of a copy, reads and writes together."""

    flops_per_second: float
    bytes_per_second: float

    def least_seconds(self, flops: float, n_bytes: float) -> float:
        """The least time for `flops` and `n_bytes`, limited by the slower of the two."""
        return max(flops / self.flops_per_second, n_bytes / self.bytes_per_second)


def describe_machine() -> dict[str, Any]:
    """Processor or accelerator, cores, and settings of the environment that change times, as JSON values."""
    device = jax.local_devices()[0]
    return {
        "platform": device.platform,
        "device": processor() if device.platform == "cpu" else device.device_kind,
        "devices": len(jax.local_devices()),
        "cores": n_cpus(),
        "system": platform.platform(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES"),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "xla_flags": os.environ.get("XLA_FLAGS"),
    }


def describe_versions(*others: str) -> dict[str, str]:
    """Versions of Python, of the packages that every experiment uses, and of `others`."""
    packages = {name: importlib.metadata.version(name) for name in (*PACKAGES, *others)}
    return {"python": sys.version.split()[0]} | packages


def processor() -> str:
    """The processor's name."""
    try:
        return re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.processor() or platform.machine()


def measure_roofline(dtype: str) -> Roofline:
    """A large matrix product and a large copy on the first local device, medians of several runs."""
    backend = jax.local_devices()[0].platform
    size = MATMUL_SIZE.get(backend, ACCELERATOR_MATMUL_SIZE)
    n_bytes = COPY_BYTES.get(backend, ACCELERATOR_COPY_BYTES)
    matrix = jnp.ones((size, size), dtype)
    array = jnp.ones(n_bytes // matrix.dtype.itemsize, dtype)
    multiply = jax.jit(jnp.matmul)
    # Adding 1 costs nothing next to the traffic, and cannot be removed as a copy could. In place: the kernel
    # hands out fresh memory page by page, several times slower.
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    latest = [array]

    def copy() -> jax.Array:
        latest[0] = add(latest[0])
        return latest[0]

    jax.block_until_ready((multiply(matrix, matrix), copy()))
    times = interleave({"matmul": lambda: multiply(matrix, matrix), "copy": copy}, BUDGET, LEAST_RUNS)
    return Roofline(2 * size**3 / times["matmul"].median, 2 * n_bytes / times["copy"].median)
