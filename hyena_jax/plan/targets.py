"""The accelerators that a step can be compiled for without having them, and their public peaks."""

import re
from math import prod
from typing import NamedTuple

from hyena_jax.config import UserError, choose, require

TERA, GIGA, GIB = 1e12, 1e9, 2**30
# Bytes of a TPU's memory that XLA keeps for itself.
KEPT = 0.25 * GIB


class Chip(NamedTuple):
    """One chip: public peaks, none of them measured here.

    Attributes:
      flops: of matrix products in bfloat16, per second.
      memory_rate: bytes per second between the main memory (HBM) and the chip.
      memory: bytes of the main memory.
      clock: cycles per second.
      cores: cores that one JAX device stands for.
      dims: axes of the torus that links the chips.
      link_rate: bytes per second that a ring along one axis of the torus brings to a chip, in both directions
        together.
    """

    flops: float
    memory_rate: float
    memory: float
    clock: float
    cores: int
    dims: int
    link_rate: float

    @property
    def vector_rate(self) -> float:
        """Elementwise operations per second: each core's 8 x 128 lanes have four arithmetic slots."""
        return self.cores * 8 * 128 * 4 * self.clock

    @property
    def usable(self) -> float:
        """Bytes of memory that a program can use."""
        return self.memory - KEPT


# Peaks: cloud.google.com/tpu/docs, pages of each version; link rates: Austin et al. 2025, How to Scale Your
# Model, part 2. A TPU's clock follows from its peak and its matrix units: 4 of 128 x 128 a core (v6e: 256).
CHIPS = {
    "v4": Chip(275 * TERA, 1228 * GIGA, 32 * GIB, 1.05e9, 2, 3, 90 * GIGA),
    "v5e": Chip(197 * TERA, 819 * GIGA, 16 * GIB, 1.5e9, 1, 2, 90 * GIGA),
    "v5p": Chip(459 * TERA, 2765 * GIGA, 95 * GIB, 1.75e9, 2, 3, 180 * GIGA),
    "v6e": Chip(918 * TERA, 1640 * GIGA, 32 * GIB, 1.75e9, 1, 2, 180 * GIGA),
}
EXTRA = "pip install 'hyena_jax[tpu]'"


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
    """The target that a name such as `v5e:4x4` or `v5p:2x2x4` describes.

    Raises:
      UserError: for an unknown kind of chip, with the nearest one; or a shape that does not fit the kind.
    """
    kind, _, shape = name.partition(":")
    chip = choose("target", kind, CHIPS)
    must = f"{kind}:{'x'.join('ABC'[: chip.dims])}, {chip.dims} numbers of chips, such as {_example(kind)}"
    require(re.fullmatch(r"\d+(x\d+)+", shape) is not None, "target", name, must)
    sizes = tuple(int(size) for size in shape.split("x"))
    require(len(sizes) == chip.dims and prod(sizes) >= 1, "target", name, must)
    # The chips of a host are a square of 2 x 2; a single chip is a host by itself.
    whole = prod(sizes) == 1 or all(size % 2 == 0 for size in sizes[:2])
    require(whole, "target", name, "of even numbers along its first two axes, or a single chip")
    require(prod(sizes) <= MOST_CHIPS, "target", name, f"at most {MOST_CHIPS} chips")
    return Target(name, chip, sizes)


# Larger topologies take minutes to describe.
MOST_CHIPS = 1024


def _example(kind: str) -> str:
    return f"{kind}:4x4" if CHIPS[kind].dims == 2 else f"{kind}:2x2x4"


def compile_only_devices(target: Target) -> list:
    """JAX devices of the target that programs can be compiled for, but not run on.

    Raises:
      UserError: if the compiler is not installed, or refuses the target.
    """
    from jax.experimental import topologies

    options = {"chips_per_host_bounds": (1, 1, 1)} if target.n_chips == 1 else {}
    if target.chip.cores == 2:
        options["chip_config_name"] = "megacore"
    try:
        return list(topologies.get_topology_desc(target.name, platform="tpu", **options).devices)
    except Exception as error:
        if "libtpu" in str(error) or isinstance(error, ModuleNotFoundError):
            raise UserError(f"target {target.name!r} needs the TPU compiler: {EXTRA}") from error
        raise UserError(f"target {target.name!r} was refused by the TPU compiler: {error}") from error
