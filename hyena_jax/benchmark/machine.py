"""What the numbers were measured on, and with."""

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax")


def describe_machine() -> dict[str, Any]:
    """Processor or accelerator, cores, memory allocator settings, as JSON values."""
    device = jax.local_devices()[0]
    return {
        "platform": device.platform,
        "device": processor() if device.platform == "cpu" else device.device_kind,
        "devices": len(jax.local_devices()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES"),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "xla_flags": os.environ.get("XLA_FLAGS"),
    }


def describe_versions(with_torch: bool) -> dict[str, str]:
    """Versions of Python and of the packages that were used."""
    packages = (*PACKAGES, "torch") if with_torch else PACKAGES
    return {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name) for name in packages}


def processor() -> str:
    """The processor's name."""
    try:
        return re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.processor() or platform.machine()
