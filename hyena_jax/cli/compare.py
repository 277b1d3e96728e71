"""`hyena-jax compare`: what several runs reached, in one table and one figure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hyena_jax.cli.base import Command, note, table_console
from hyena_jax.config.flags import FLAT, PluginFlags, positional
from hyena_jax.system.startup import import_jax
from hyena_jax.system.storage.location import Location


@dataclass(frozen=True)
class Compare(Command):
    """Compare runs: one table, and with --output one figure of their curves. DIR is a run or a sweep.

    Runs that differ only in their seed are one row: the mean over seeds, and the range. State KiB: decoding
    state of a sequence of model.max_len tokens.
    """

    dirs: tuple[Path | Location, ...] = field(metadata=positional("DIR..."))
    """Folders of runs, or folders with runs in them."""
    by: tuple[str, ...] = ()
    """Group runs by this setting instead, such as `variant` or `optimizer.learning-rate`; may be repeated."""
    best_by: str | None = None
    """Show of this setting, such as `optimizer.learning-rate`, only the value with the best mean."""
    metric: str | None = None
    """Value on held-out data to compare; by default the loss of language models, else the first accuracy."""
    x: Literal["step", "seconds", "tokens"] = "step"
    """Horizontal axis of the figure."""
    output: Path | None = None
    """File of the figure (.png, .pdf, .svg); the table is written beside it as .csv and .md."""
    overwrite: bool = False
    """Replace these files where they exist."""
    plugins: PluginFlags = field(default=PluginFlags(), metadata=FLAT)

    def run(self, arguments: Sequence[str]) -> int:
        import_jax()  # only shapes are computed: no device is started

        from hyena_jax.sweeps.compare import compare, text_table

        output, console = self.output, table_console()
        rows = compare(
            self.dirs,
            by=self.by,
            best_by=self.best_by,
            metric=self.metric,
            x=self.x,
            output=output,
            overwrite=self.overwrite,
            note=note,
        )
        console.print(text_table(rows))
        if output is not None:
            tables = f"{output.with_suffix('.md')}, {output.with_suffix('.csv')}"
            console.print(f"\nfigure: {output}   table: {tables}", soft_wrap=True)
        return 0
