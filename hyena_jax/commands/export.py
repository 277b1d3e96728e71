"""`hyena-jax export`: the parameters of a run as a safetensors file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyena_jax import config
from hyena_jax.commands import RunSelection, note
from hyena_jax.config.flags import FLAT
from hyena_jax.startup import start_jax


@dataclass(frozen=True)
class Export:
    """Write a run's parameters to a safetensors file, and its config next to it."""

    run: RunSelection = field(metadata=FLAT)
    output: Path
    """File to write, such as model.safetensors."""


def run(command: Export, arguments: Sequence[str]) -> int:
    """Writes the file, and says where."""
    start_jax(note)

    from hyena_jax.api import load_run
    from hyena_jax.training import export
    from hyena_jax.training.lora import without_lora

    export.check_target(command.output)
    run = load_run(command.run.workdir, command.run.step)
    export.write(command.output, run.params, config.encode(without_lora(run.experiment)), run.step)
    config_file = export.config_beside(command.output)
    print(f"step {run.step} written to {command.output}, its config to {config_file}")
    return 0
