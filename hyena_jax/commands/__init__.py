"""The commands, one file each: a dataclass of its flags, and `run(command, arguments)`, its exit code.

No file here imports JAX at module level, so that `--help` and wrong flags answer at once.
"""

from dataclasses import dataclass, field
from pathlib import Path

from hyena_jax.config import PluginFlags
from hyena_jax.config.flags import FLAT, positional


@dataclass(frozen=True)
class RunSelection:
    """Which parameters of which run."""

    workdir: Path = field(metadata=positional("WORKDIR"))
    """Folder of a run."""
    step: str = "latest"
    """Checkpoint: `latest`, `best` (lowest validation loss), or the number of a saved step."""
    plugins: PluginFlags = field(default=PluginFlags(), metadata=FLAT)
