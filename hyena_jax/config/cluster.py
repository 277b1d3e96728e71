"""How a process finds the others that train with it. No part of the experiment: it may differ every time."""

from dataclasses import dataclass

from hyena_jax.config.checks import Checked, require


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

    def __post_init__(self) -> None:
        super().__post_init__()
        together = "given with coordinator, and only then"
        for name in ("num_processes", "process_id"):
            value = getattr(self, name)
            require((value is None) == (self.coordinator is None), name, value, together)
        if self.coordinator is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        is_address = bool(host) and port.isdecimal()
        require(is_address, "coordinator", self.coordinator, "HOST:PORT")
        require(self.num_processes >= 1, "num_processes", self.num_processes, "at least 1")
        inside = 0 <= self.process_id < self.num_processes
        require(inside, "process_id", self.process_id, f"in 0..{self.num_processes - 1}")
