"""The accelerators that a step can be compiled for without having them, and their public peaks."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from math import inf, prod
from typing import NamedTuple

from hyena_jax.config import UserError, choose, require

TERA, GIGA, GIB = 1e12, 1e9, 2**30


class Chip(NamedTuple):
    """One chip: public peaks, none of them measured here.

    Attributes:
      platform: "tpu" or "cuda".
      flops: of matrix products in bfloat16, per second.
      passes: by the precision of a product in float32, how many times as long as in bfloat16 it takes.
      vector_rate: elementwise operations per second.
      register_rate: results of 8 x 128 elements per second that libtpu's compiler grants instructions without
        products: see `roofline`. Infinite elsewhere.
      memory_rate: bytes per second between the main memory (HBM) and the chip.
      usable: bytes of the main memory that a program can use.
      dims: axes of the torus that links the chips.
      link_rate: bytes per second that a ring along one axis of the torus brings to a chip, in both directions
        together.
      most: chips of the largest target.
    """

    platform: str
    flops: float
    passes: Mapping[str, float]
    vector_rate: float
    register_rate: float
    memory_rate: float
    usable: float
    dims: int
    link_rate: float
    most: int


def _tpu(
    flops: float, memory_rate: float, memory: float, clock: float, cores: int, dims: int, link_rate: float
) -> Chip:
    """A TPU of `cores` cores a JAX device, whose 8 x 128 lanes have four arithmetic slots each."""
    return Chip(
        platform="tpu",
        flops=flops * TERA,
        passes={"default": 1, "high": 3, "highest": 6},
        vector_rate=cores * 8 * 128 * 4 * clock,
        register_rate=cores * clock / 24,
        memory_rate=memory_rate * GIGA,
        usable=(memory - 0.25) * GIB,  # XLA keeps a quarter of a GiB for itself
        dims=dims,
        link_rate=link_rate * GIGA,
        most=1024,  # larger topologies take minutes to describe
    )


# Peaks of TPUs: cloud.google.com/tpu/docs, pages of each version; link rates: Austin et al. 2025, How to
# Scale Your Model, part 2. A clock follows from the peak and a core's 4 matrix units of 128 x 128 (v6e: 256).
# H100 SXM: NVIDIA's data sheet (dense products; TF32 is a product's default precision in float32), NVLink 4.
CHIPS = {
    "v4": _tpu(275, 1228, 32, 1.05e9, 2, 3, 90),
    "v5e": _tpu(197, 819, 16, 1.5e9, 1, 2, 90),
    "v5p": _tpu(459, 2765, 95, 1.75e9, 2, 3, 180),
    "v6e": _tpu(918, 1640, 32, 1.75e9, 1, 2, 180),
    "h100": Chip(
        platform="cuda",
        flops=989 * TERA,
        passes={"default": 2, "high": 2, "highest": 989 / 67},
        vector_rate=33.5 * TERA,
        register_rate=inf,
        memory_rate=3350 * GIGA,
        usable=79 * GIB,
        dims=1,
        link_rate=900 * GIGA,
        most=8,
    ),
}
# What XLA's compiler has to know of an H100, in the form that `jax.experimental.topologies` takes.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  device_memory_size: 84929347584
  cuda_compute_capability { major: 9 }
}
runtime_version { major: 13 }
dnn_version_info { major: 9  minor: 7 }
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class Target(NamedTuple):
    """Chips of one kind, linked to a torus of `shape`."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def n_chips(self) -> int:
        """Number of chips."""
        return prod(self.shape)


def parse_target(name: str) -> Target:
    """The target that a name such as `v5e:4x4`, `v5p:2x2x4`, `h100` or `h100:8` describes.

    Raises:
      UserError: for an unknown kind of chip, with the nearest one; or a shape that does not fit the kind.
    """
    kind, _, shape = name.partition(":")
    chip = choose("target", kind, CHIPS)
    if chip.dims == 1:
        must = f"{kind}, or {kind}:N with N from 1 to {chip.most}"
    else:
        example = f"{kind}:4x4" if chip.dims == 2 else f"{kind}:2x2x4"
        must = f"{kind}:{'x'.join('ABC'[: chip.dims])}, {chip.dims} numbers of chips, such as {example}"
    shape = "1" if chip.dims == 1 and not shape else shape
    # Python refuses to read numbers of thousands of digits.
    require(re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9}){0,9}", shape) is not None, "target", name[:40], must)
    sizes = tuple(int(size) for size in shape.split("x"))
    require(len(sizes) == chip.dims and prod(sizes) >= 1, "target", name, must)
    require(prod(sizes) <= chip.most, "target", name, f"at most {chip.most} chips")
    # The chips of a TPU's host are a square of 2 x 2; a single chip is a host by itself.
    whole = chip.dims == 1 or prod(sizes) == 1 or all(size % 2 == 0 for size in sizes[:2])
    require(whole, "target", name, "of even numbers along its first two axes, or a single chip")
    return Target(name, chip, sizes)


def require_compiler(target: Target) -> str:
    """The package of the target's compiler; UserError, with what to install, if that is missing."""
    package, module, wheels = "libtpu", "libtpu", "'hyena_jax[tpu]'"
    if target.chip.platform == "cuda":
        version = importlib.metadata.version("jaxlib")
        package, module = "jax-cuda13-pjrt", "jax_plugins.xla_cuda13"
        wheels = f"--no-deps jax-cuda13-pjrt=={version} jax-cuda13-plugin=={version} nvidia-cuda-nvcc"
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of the package around it
        found = None
    if found is None:
        raise UserError(
            f"target {target.name!r} needs its compiler, which is not installed: pip install {wheels}"
        )
    return package


def compile_only_devices(target: Target) -> list:
    """JAX devices of the target that programs can be compiled for, but not run on.

    Raises:
      UserError: if the compiler refuses the target.
    """
    from jax.experimental import topologies

    if target.chip.platform == "cuda":
        options = {"target_config": H100, "topology": f"1x1x{target.n_chips}"}
        return list(topologies.get_topology_desc(platform="cuda", **options).devices)
    options = {"chips_per_host_bounds": (1, 1, 1)} if target.n_chips == 1 else {}
    if target.name.startswith(("v4", "v5p")):  # one device for both cores of a chip
        options["chip_config_name"] = "megacore"
    try:
        return list(topologies.get_topology_desc(target.name, platform="tpu", **options).devices)
    except Exception as error:
        raise UserError(f"target {target.name!r} was refused by the TPU compiler: {error}") from error
