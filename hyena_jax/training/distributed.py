"""Several processes, through `jax.distributed`: how they meet, and the few things they must agree on.

Everything here also holds for one process, where it costs nothing.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from hyena_jax.config import UserError, require

T = TypeVar("T")


@dataclass(frozen=True)
class Cluster:
    """How this process finds the others."""

    distributed: bool = False
    """Join the other processes that the cluster's environment names (Slurm, Open MPI, Kubernetes, TPU)."""
    coordinator: str | None = None
    """HOST:PORT of process 0, where nothing in the environment says it."""
    num_processes: int | None = None
    """Processes in all; with coordinator."""
    process_id: int | None = None
    """Number of this process, from 0; with coordinator."""

    def __post_init__(self) -> None:
        explicit = {"num_processes": self.num_processes, "process_id": self.process_id}
        for name, value in explicit.items():
            together = "given with coordinator, and absent without it"
            require((value is None) == (self.coordinator is None), name, value, together)
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            require(bool(host) and port.isdecimal(), "coordinator", self.coordinator, "HOST:PORT")
            require(self.num_processes >= 1, "num_processes", self.num_processes, "at least 1")
            most = f"in 0..{self.num_processes - 1}"
            require(0 <= self.process_id < self.num_processes, "process_id", self.process_id, most)


def join(cluster: Cluster, heartbeat_timeout: int) -> None:
    """Joins the other processes, if there are to be any. Must come before anything is computed.

    Args:
      heartbeat_timeout: seconds; a process that is silent for longer is taken for dead, and JAX ends the
        others. A process that ended waits as long for the others to end.

    Raises:
      UserError: if nothing says where the others are.
      OSError: if they cannot be reached within that time, but at least a minute.
    """
    if not cluster.distributed and cluster.coordinator is None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its handler of SIGTERM would take the place of ours; the loop agrees on stopping by itself.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.num_processes,
            cluster.process_id,
            cluster_detection_method="deactivate" if cluster.coordinator else None,
            initialization_timeout=max(60, heartbeat_timeout),
            heartbeat_timeout_seconds=heartbeat_timeout,
            shutdown_timeout_seconds=heartbeat_timeout,
        )
    except ValueError as error:
        raise UserError(
            f"distributed: this environment names no other processes ({error}); give --coordinator, "
            "--num-processes and --process-id"
        ) from error
    except RuntimeError as error:
        raise OSError(f"the other processes cannot be reached: {error}") from error


def leave_at_once(code: int) -> NoReturn:
    """Ends this process without the farewell of `jax.distributed`, for which others would be waited for.

    They may be in the middle of a computation that needs this process: they learn of its end from this.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_first() -> bool:
    """Whether this is process 0, which alone prints and writes."""
    return jax.process_index() == 0


def gather(value: T) -> list[T]:
    """The JSON values that all processes call this with, in their order. All must call it."""
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    # A power of two, so that few lengths are compiled.
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)
    padded[: len(text)] = text
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def from_first(make: Callable[[], T]) -> T:
    """What `make` returns (a JSON value) on process 0, given to all; so is the UserError that it raises.

    Every process must call this; `make` runs on process 0 alone.
    """
    if jax.process_count() == 1:
        return make()
    outcome: dict[str, Any] = {}
    if is_first():
        try:
            outcome = {"value": make()}
        except UserError as error:
            outcome = {"error": str(error)}
    outcome = gather(outcome)[0]
    if "error" in outcome:
        raise UserError(outcome["error"])
    return outcome["value"]


def require_equal(what: str, value: Any) -> None:
    """Raises UserError, on all processes, unless all call this with the same JSON value."""
    values = gather(value)
    others = [i for i, other in enumerate(values) if other != values[0]]
    if others:
        raise UserError(f"{what} must be the same in all processes, but differs in process {others[0]}")


def first_request(name: str | None) -> str | None:
    """The signal that the first process that got one got; None if none did. All must call it."""
    return next((asked for asked in gather(name) if asked is not None), None)
