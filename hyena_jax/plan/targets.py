"""The accelerators that a step can be compiled for without having them."""

import importlib.metadata
import importlib.util
import re
from math import prod
from typing import NamedTuple

from hyena_jax.system.chips import CHIPS, Chip
from hyena_jax.system.errors import UserError, choose, require

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
    """Chips of one kind, linked to a torus of `shape`; or several such slices, connected by a network."""

    name: str
    """Of a slice."""
    chip: Chip
    shape: tuple[int, ...]
    n_slices: int = 1

    @property
    def chips_of_slice(self) -> int:
        return prod(self.shape)

    @property
    def n_chips(self) -> int:
        return self.n_slices * self.chips_of_slice

    def __str__(self) -> str:
        return self.name if self.n_slices == 1 else f"{self.n_slices} slices of {self.name}"


def parse_target(name: str, n_slices: int = 1) -> Target:
    """The target that `v5e:4x4`, `v5p:2x2x4`, `h100` or `h100:8` names, as so many slices."""
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
    known = ", ".join(kind for kind, chip in CHIPS.items() if chip.between_slices is not None)
    can_be_several = n_slices == 1 or chip.between_slices is not None
    require(can_be_several, "num_slices", n_slices, f"1 for {kind}: the network is known for {known}")
    most = chip.most // prod(sizes)
    require(1 <= n_slices <= most, "num_slices", n_slices, f"in 1..{most}, for at most {chip.most} chips")
    # The chips of a TPU's host are a square of 2 x 2; a single chip is a host by itself.
    whole = chip.dims == 1 or prod(sizes) == 1 or all(size % 2 == 0 for size in sizes[:2])
    require(whole, "target", name, "of even numbers along its first two axes, or a single chip")
    return Target(name, chip, sizes, n_slices)


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
    for requirement in importlib.metadata.requires("jax") or ():
        wanted = re.match(rf"{package}==([\d.]+)\.\*", requirement)
        if wanted and not f"{importlib.metadata.version(package)}.".startswith(f"{wanted[1]}."):
            found, jax = importlib.metadata.version(package), importlib.metadata.version("jax")
            raise UserError(
                f"{package} {found} does not fit jax {jax}: pip install '{package}=={wanted[1]}.*'"
            )
    return package


def compile_only_devices(target: Target) -> list:
    """JAX devices of the target that programs can be compiled for, but not run on."""
    from jax.experimental import topologies

    if target.chip.platform == "cuda":
        options = {"target_config": H100, "topology": f"1x1x{target.n_chips}"}
        return list(topologies.get_topology_desc(platform="cuda", **options).devices)
    options = {"chips_per_host_bounds": (1, 1, 1)} if target.chips_of_slice == 1 else {}
    if target.n_slices > 1:
        options["num_slices"] = target.n_slices
    if target.name.startswith(("v4", "v5p")):  # one device for both cores of a chip
        options["chip_config_name"] = "megacore"
    try:
        return list(topologies.get_topology_desc(target.name, platform="tpu", **options).devices)
    except Exception as error:
        raise UserError(f"target {target.name!r} was refused by the TPU compiler: {error}") from error
