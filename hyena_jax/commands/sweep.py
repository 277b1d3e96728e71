"""`hyena-jax sweep`: trains every combination of the values of some settings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyena_jax.commands import fail, note
from hyena_jax.config import Experiment, PluginFlags
from hyena_jax.config.flags import FLAT, positional


@dataclass(frozen=True)
class Sweep:
    """Train CONFIG with every combination of the values of some settings, each run in DIR/NAME.

    `--grid seed=0,1,2 --grid variant=hyena,hawk` trains six runs. Any flag of `train CONFIG` is a setting:
    `--grid optimizer.learning-rate=1e-3,3e-3`; values that are lists are separated by semicolons:
    `--grid "model.pattern=hyena;hawk,hyena"`. Other flags of `train` apply to all runs. The same command
    continues a sweep that was stopped or killed. Exit code 1: some run failed or diverged.
    """

    config: str = field(metadata=positional("CONFIG[:VARIANT]"))
    """Name of a config, or a Python file with get_config()."""
    workdir: Path
    """Folder of the sweep; created if missing, continued if it holds these runs."""
    grid: tuple[str, ...]
    """FIELD=VALUE,VALUE,...; FIELD is a flag of `train` without its dashes, or `variant`; may be repeated."""
    jobs: int = 1
    """Runs that are trained at the same time, each on an equal part of the CPUs."""
    until: str | None = None
    """Stop each run at the first evaluation that reaches this: `accuracy=0.99`, or `loss=1.5` (at most)."""
    plugins: PluginFlags = field(default=PluginFlags(), metadata=FLAT)
    experiment: Experiment = field(default=Experiment(), metadata=FLAT)


OWN = ("--workdir", "--grid", "--jobs", "--until", "--plugin")
"""Flags that are not settings of the runs."""


def run(command: Sweep, arguments: Sequence[str]) -> int:
    """Trains the runs of the grid, and prints a line for each."""
    from hyena_jax.sweeps.grid import make_runs, parse_axis, with_until
    from hyena_jax.sweeps.sweep import sweep
    from hyena_jax.training.signals import Interrupted

    axes: dict[str, tuple[str, ...]] = {}
    for text in command.grid:
        name, values = parse_axis(text)
        axes[name] = (*axes.get(name, ()), *values)
    runs = make_runs(command.config, axes, _settings(arguments))
    if command.until is not None:
        runs = with_until(runs, command.until)
    try:
        outcomes = sweep(runs, command.workdir, jobs=command.jobs)
    except Interrupted as error:
        note(str(error))
        return 75
    bad = {name: outcome for name, outcome in outcomes.items() if outcome.error is not None}
    print(f"\ncompare them: hyena-jax compare {command.workdir}")
    if bad:
        return fail(f"{len(bad)} of {len(outcomes)} runs failed or diverged: {', '.join(bad)}", 1)
    return 0


def _settings(arguments: Sequence[str]) -> list[str]:
    """The arguments that set the experiment of all runs: neither CONFIG nor the sweep's own flags."""
    rest, is_own = [], False
    for argument in arguments[2:]:
        if argument.startswith("--"):
            name = argument.partition("=")[0]
            is_own = name in OWN
            if is_own:
                continue
        if not is_own:
            rest.append(argument)
    return rest
