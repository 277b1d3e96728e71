"""Accelerators, and their public peaks."""

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

TERA, GIGA, MIB, GIB = 1e12, 1e9, 2**20, 2**30


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
      between_slices: bytes per second that a chip receives through the data-centre network from other slices;
        None where that is not public.
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
    between_slices: float | None = None


def _tpu(
    flops: float,
    memory_rate: float,
    memory: float,
    clock: float,
    cores: int,
    dims: int,
    link_rate: float,
    between_slices: float | None = None,
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
        between_slices=between_slices and between_slices * GIGA,
    )


# Peaks of TPUs, and their network between slices: cloud.google.com/tpu/docs, pages of each version; rates of
# links: Austin et al. 2025, How to Scale Your Model, part 2. A clock follows from the peak and a core's 4
# matrix units of 128 x 128 (v6e: 256). H100 SXM: NVIDIA's data sheet (dense products; TF32 is a product's
# default precision in float32), NVLink 4.
CHIPS = {
    "v4": _tpu(275, 1228, 32, 1.05e9, 2, 3, 90),
    "v5e": _tpu(197, 819, 16, 1.5e9, 1, 2, 90, 3.125),
    "v5p": _tpu(459, 2765, 95, 1.75e9, 2, 3, 180, 6.25),
    "v6e": _tpu(918, 1640, 32, 1.75e9, 1, 2, 180, 12.5),
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

# Names of `jax.Device.device_kind`.
KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "NVIDIA H100 80GB HBM3": "h100",
}


def peak_flops(device_kind: str) -> float | None:
    """Products in bfloat16 per second of a JAX device of this kind; None if that is not known here."""
    return CHIPS[KINDS[device_kind]].flops if device_kind in KINDS else None
