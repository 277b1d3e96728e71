"""How a process finds the others that train with it. No part of the experiment: it may differ every time."""

import re
from dataclasses import dataclass

from hyena_jax.config.checks import Checked, require

# A name, an address of IPv4, or one of IPv6 in brackets; a name's label has at most 63 characters.
ADDRESS = re.compile(r"([a-zA-Z0-9_-]{1,63}(\.[a-zA-Z0-9_-]{1,63})*\.?|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")


@dataclass(frozen=True)
class Cluster(Checked):
    """The processes that share one training."""

    distributed: bool = False
    """Join the processes that the cluster's environment names (Slurm, Open MPI, Kubernetes, Cloud TPU)."""
    coordinator: str | None = None
    """HOST:PORT where process 0 is met; instead of distributed, with num_processes and process_id."""
    num_processes: int | None = None
    """Processes in all."""
    process_id: int | None = None
    """Number of this process, from 0."""
    join_timeout: float = 60.0
    """Seconds to wait for the other processes when training starts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.join_timeout > 0, "join_timeout", self.join_timeout, "more than 0")
        together = "given with coordinator, and only then"
        for name in ("num_processes", "process_id"):
            value = getattr(self, name)
            require((value is None) == (self.coordinator is None), name, value, together)
        if self.coordinator is None:
            return
        require(not self.distributed, "distributed", True, "False where coordinator is given")
        require_address("coordinator", self.coordinator)
        require(self.num_processes >= 1, "num_processes", self.num_processes, "at least 1")
        inside = 0 <= self.process_id < self.num_processes
        require(inside, "process_id", self.process_id, f"in 0..{self.num_processes - 1}")


def require_address(argument: str, value: str) -> None:
    """Raises UserError unless the value is HOST:PORT."""
    require(bool(ADDRESS.fullmatch(value)), argument, value, "HOST:PORT")
    port = int(value.rpartition(":")[2])
    require(1 <= port <= 65535, argument, value, "HOST:PORT with a port in 1..65535")
