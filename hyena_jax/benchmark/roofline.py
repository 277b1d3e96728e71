"""What this machine can do at most, measured: a large matrix product, and a large copy."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.benchmark.timing import compile_program, interleave

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
        """The time that work takes when the slower of the two limits it."""
        return max(flops / self.flops_per_second, n_bytes / self.bytes_per_second)


def measure_roofline(dtype: str) -> Roofline:
    """Medians of several runs on the first local device."""
    platform = jax.local_devices()[0].platform
    size = MATMUL_SIZE.get(platform, ACCELERATOR_MATMUL_SIZE)
    n_bytes = COPY_BYTES.get(platform, ACCELERATOR_COPY_BYTES)
    matrix = jnp.ones((size, size), dtype)
    array = jnp.ones(n_bytes // matrix.dtype.itemsize, dtype)
    multiply = compile_program(jnp.matmul, matrix, matrix).executable
    # Adding 1 costs nothing beside the traffic, and cannot be removed as a copy could. In place: fresh memory
    # is handed out by the kernel page by page, several times slower.
    add = compile_program(lambda x: x + 1, array, donate=(0,)).executable
    latest = [array]

    def copy() -> jax.Array:
        latest[0] = add(latest[0])
        return latest[0]

    jax.block_until_ready((multiply(matrix, matrix), copy()))
    times = interleave({"matmul": lambda: multiply(matrix, matrix), "copy": copy}, BUDGET, LEAST_RUNS)
    return Roofline(2 * size**3 / times["matmul"].median, 2 * n_bytes / times["copy"].median)
