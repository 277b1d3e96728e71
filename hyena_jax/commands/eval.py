"""`hyena-jax eval`: the loss and metrics of a run on held-out data."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hyena_jax.commands import RunSelection, note
from hyena_jax.config.flags import FLAT
from hyena_jax.startup import start_jax


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a run on all of its held-out data."""

    run: RunSelection = field(metadata=FLAT)
    path: str | None = None
    """Text file or folder, or folder of IDX images, to evaluate on instead of the held-out data."""
    batch_size: int = 64
    """Sequences or images evaluated at once; does not change the result."""


def run(command: Evaluate, arguments: Sequence[str]) -> int:
    """Prints a table of metrics."""
    start_jax(note)

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hyena_jax.api import load_run

    run = load_run(command.run.workdir, command.run.step)
    values = run.evaluate(command.path, command.batch_size, progress=True)
    table = Table("metric", "value", title=Text(f"{run.workdir}, step {run.step}"), box=None)
    for name, value in values.items():
        table.add_row(name, f"{value:,.6g}")
    Console(highlight=False).print(table)
    return 0
