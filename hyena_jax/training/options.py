"""What a start of a run is asked for: flags of `hyena-jax train`, arguments of `hyena_jax.train`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from hyena_jax.config import AtLeast
from hyena_jax.config.checks import Checked
from hyena_jax.system.errors import as_urls
from hyena_jax.system.storage.location import Location


@dataclass(frozen=True)
class StartOptions(Checked):
    """What a start of a run is asked for besides its experiment; the run's folder does not keep it."""

    profile: Path | None = None
    """Write a jax.profiler trace of ten steps to this folder, soon after the start."""
    profile_at: Annotated[tuple[int, ...], AtLeast(0)] = ()
    """Trace the ten steps after each of these steps instead, into subfolders of --profile."""
    profile_every: Annotated[int | None, AtLeast(11)] = None
    """Trace ten steps after every N steps instead, into subfolders of --profile."""
    init_from: Path | Location | None = None
    """Initial parameters of a new run: a file written by `export`, or the folder of a run, whose newest
    checkpoint and tokenizer it then takes."""
    accept_changed_data: bool = False
    """Continue the run although its data changed; the new data are read with the run's tokenizer."""
    accept_changed_optimizer: bool = False
    """Continue the run with other values of its optimizer, such as its learning rate, schedule, weight decay
    or clipping; the folder keeps from which step on. What the optimizer's state holds must not change."""

    def shared(self) -> dict[str, Any]:
        """The JSON values that several processes must have in common: each may trace into its own folder."""
        names = [field.name for field in fields(self) if not field.name.startswith("profile")]
        return {name: getattr(self, name) for name in names} | {"init_from": as_urls(self.init_from)}


NO_OPTIONS = StartOptions()
