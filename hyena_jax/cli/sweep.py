"""`hyena-jax sweep`: trains every combination of the values of some settings."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyena_jax.cli.base import Command, fail, note, require_config_first, unread
from hyena_jax.cli.flags import FLAT, OTHERS, positional
from hyena_jax.config import PluginFlags, plugin_flags
from hyena_jax.errors import printable


@dataclass(frozen=True)
class Sweep(Command):
    """Train CONFIG with every combination of the values of some settings, each run in DIR/NAME.

    `--grid seed=0,1,2 --grid variant=hyena,hawk` trains six runs. Any flag of `train CONFIG` is a setting:
    `--grid optimizer.learning-rate=1e-3,3e-3`; lists of parts are separated by semicolons:
    `--grid "model.pattern=hyena;hawk,hyena"`. All other flags of `train CONFIG` may be given too, and apply
    to all runs. The same command continues a sweep that was stopped or killed. Exit code 1: some run failed
    or diverged.
    """

    config: str = field(metadata=positional("CONFIG[:VARIANT]"))
    """Name of a config, or a Python file with get_config()."""
    workdir: Path
    """Folder of the sweep; created if missing, continued if it holds these runs."""
    grid: tuple[str, ...]
    """FIELD=VALUE,VALUE,...; FIELD is a flag of `train` without its dashes, or `variant`; may be repeated."""
    jobs: int = 1
    """Runs that are trained at the same time, each on an equal part of the CPUs."""
    init_from: Path | None = None
    """Initial parameters of every run: a file written by `export`, or the folder of a run, as in `train`."""
    until: str | None = None
    """The runs' `training.until`: stop at the first evaluation that reaches it, such as `accuracy=0.99`."""
    plugins: PluginFlags = field(default=PluginFlags(), metadata=FLAT)
    settings: tuple[str, ...] = field(default=(), metadata=OTHERS)
    """All other flags, which are settings of the runs: their configs depend on the grid."""

    @classmethod
    def take(cls, called: str, arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
        """Refuses a flag before CONFIG."""
        arguments, values = super().take(called, arguments)
        require_config_first(called, arguments)
        return arguments, values

    def run(self, arguments: Sequence[str]) -> int:
        """Trains the runs of the grid, and prints a line for each."""
        from hyena_jax.signals import Interrupted
        from hyena_jax.sweeps.grid import make_runs, parse_axis
        from hyena_jax.sweeps.sweep import sweep
        from hyena_jax.sweeps.worker import DONE

        axes: dict[str, tuple[str, ...]] = {}
        for text in self.grid:
            name, values = parse_axis(text)
            axes[name] = (*axes.get(name, ()), *values)
        until = [] if self.until is None else [f"--training.until={self.until}"]
        runs = make_runs(self.config, axes, [*self.settings, *until])
        try:
            outcomes = sweep(runs, self.workdir, jobs=self.jobs, init_from=self.init_from)
        except Interrupted as error:
            note(str(error))
            return 75
        except BrokenPipeError:
            return unread()
        plugins = plugin_flags(tuple(runs.values()))
        print(
            f"\nto compare the runs: hyena-jax compare {printable(shlex.quote(str(self.workdir)))}{plugins}"
        )
        bad = [name for name, outcome in outcomes.items() if outcome.status != DONE]
        if bad:
            return fail(f"{len(bad)} of {len(outcomes)} runs failed or diverged: {', '.join(bad)}", 1)
        return 0
