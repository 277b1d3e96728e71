"""`hyena-jax sweep`: trains every combination of the values of some settings."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hyena_jax.cli.base import Command, fail, note, require_config_first, say, unread
from hyena_jax.config import plugin_flags
from hyena_jax.config.flags import FLAT, OTHERS, PluginFlags, positional
from hyena_jax.system.errors import as_urls, require
from hyena_jax.system.storage.location import Location


@dataclass(frozen=True)
class Sweep(Command):
    """Train CONFIG with every combination of the values of some settings, each run in DIR/NAME.

    `--grid seed=0,1,2 --grid variant=hyena,hawk` trains six runs. Any setting of CONFIG can be varied:
    `--grid optimizer.learning-rate=1e-3,3e-3`; lists of parts are separated by semicolons:
    `--grid "model.pattern=hyena;hawk,hyena"`. Other settings may be given too, and apply to all runs; flags
    of `train` itself, such as `--profile`, may not. The same command continues a sweep that was stopped or
    killed. Exit code 1: some run failed or diverged.
    """

    config: str = field(metadata=positional("CONFIG[:VARIANT]"))
    """Name of a config, or a Python file with get_config()."""
    workdir: Path | Location
    """Folder of the sweep; created if missing, continued if it holds these runs; or gs://BUCKET/NAME."""
    grid: tuple[str, ...]
    """FIELD=VALUE,VALUE,...; FIELD is a flag of `train` without its dashes, or `variant`; may be repeated."""
    jobs: int = 1
    """Runs that are trained at the same time, each on an equal part of this machine's CPUs."""
    engine: Literal["local", "ray"] = "local"
    """`local`: on this machine. `ray`: on a running Ray cluster, whose machines all see DIR or its bucket."""
    address: str | None = None
    """Address of the Ray cluster; None takes the one of this machine."""
    per_run: tuple[str, ...] = ()
    """What Ray reserves for a run, such as `CPU=4`, `GPU=1` or `TPU=4`; without it, `CPU=1`."""
    together: str | None = None
    """Settings, such as `seed,optimizer.learning-rate`: runs that differ in these alone are trained in one
    program, which computes their gradients at once; values are as for each alone, but for rounding."""
    init_from: Path | Location | None = None
    """Initial parameters of every run: a file written by `export`, or the folder of a run, as in `train`."""
    until: str | None = None
    """The runs' `training.until`: stop at the first evaluation that reaches it, such as `accuracy=0.99`."""
    plugins: PluginFlags = field(default=PluginFlags(), metadata=FLAT)
    settings: tuple[str, ...] = field(default=(), metadata=OTHERS)
    """All other flags, which are settings of the runs: their configs depend on the grid."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("address", self.address), ("per_run", self.per_run)):
            require(self.engine == "ray" or not value, name, value, "left out unless engine is 'ray'")

    @classmethod
    def take(cls, called: str, arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
        arguments, values = super().take(called, arguments)
        require_config_first(called, arguments)
        return arguments, values

    def run(self, arguments: Sequence[str]) -> int:
        from hyena_jax.sweeps.grid import make_runs, parse_axis
        from hyena_jax.sweeps.pool import DONE
        from hyena_jax.sweeps.sweep import sweep
        from hyena_jax.system.signals import STOPPED_CODE, Interrupted

        axes: dict[str, tuple[str, ...]] = {}
        for text in self.grid:
            name, values = parse_axis(text)
            axes[name] = (*axes.get(name, ()), *values)
        until = [] if self.until is None else [f"--training.until={self.until}"]
        runs = make_runs(self.config, axes, [*self.settings, *until])
        engine, jobs = None, self.jobs
        if self.engine == "ray":
            from hyena_jax.sweeps.cluster import RayCluster, parse_resources

            engine, jobs = RayCluster(self.address or "auto", jobs, parse_resources(self.per_run)), 1
        try:
            options = {"jobs": jobs, "engine": engine, "init_from": self.init_from}
            fields = self.together.replace("-", "_").split(",") if self.together else ()
            outcomes = sweep(runs, self.workdir, together=fields, **options)
        except Interrupted as error:
            note(str(error))
            return STOPPED_CODE
        except BrokenPipeError:
            return unread()
        root, plugins = shlex.quote(as_urls(self.workdir)), plugin_flags(tuple(runs.values()))
        say(f"\nto compare the runs: hyena-jax compare {root}{plugins}")
        bad = [name for name, outcome in outcomes.items() if outcome.status != DONE]
        if bad:
            return fail(f"{len(bad)} of {len(outcomes)} runs failed or diverged: {', '.join(bad)}", 1)
        return 0
