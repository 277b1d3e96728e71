"""How a process finds the other processes of a training. Not part of the experiment: it may change."""

import re
from dataclasses import dataclass
from typing import Annotated

from hyena_jax.config.checks import Above, AtLeast, Checked
from hyena_jax.errors import require

# A host name, an IPv4 address, or an IPv6 address in brackets; a label of a name has at most 63 characters.
ADDRESS = re.compile(r"([a-zA-Z0-9_-]{1,63}(\.[a-zA-Z0-9_-]{1,63})*\.?|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")


@dataclass(frozen=True)
class Cluster(Checked):
    """Training by several processes."""

    distributed: bool = False
    """Join the processes that the cluster's environment names (Slurm, Open MPI, Kubernetes, Cloud TPU)."""
    coordinator: str | None = None
    """HOST:PORT of process 0, given with --num-processes and --process-id, instead of --distributed."""
    num_processes: Annotated[int | None, AtLeast(1)] = None
    """Number of processes."""
    process_id: int | None = None
    """Index of this process, from 0."""
    join_timeout: Annotated[float, Above(0)] = 60.0
    """Seconds to wait for the other processes when training starts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        together = "given with coordinator, and only then"
        for name in ("num_processes", "process_id"):
            value = getattr(self, name)
            require((value is None) == (self.coordinator is None), name, value, together)
        if self.coordinator is None:
            return
        require(not self.distributed, "distributed", True, "False when coordinator is given")
        require_address("coordinator", self.coordinator)
        inside = 0 <= self.process_id < self.num_processes
        require(inside, "process_id", self.process_id, f"in 0..{self.num_processes - 1}")


def require_address(argument: str, value: str) -> None:
    """Raises UserError unless the value is HOST:PORT."""
    require(bool(ADDRESS.fullmatch(value)), argument, value, "HOST:PORT")
    port = int(value.rpartition(":")[2])
    require(1 <= port <= 65535, argument, value, "HOST:PORT with a port in 1..65535")
