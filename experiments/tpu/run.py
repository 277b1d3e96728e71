"""What the training steps of all paper-size configs take on TPUs, estimated by compiling them ahead of time.

python experiments/tpu/run.py [--only hawk ...] [--targets v5e:4x4 ...] [--again]

Every config and variant, on 16 chips of v5e and of v5p: with pmap, with parameters sharded over 16 chips, and
with parameters and sequences each sharded over 4; and Hyena 125M with each other mixer in its place. If the
config's batch does not fit, halves of it are tried. Three programs are compiled whole, at the same batch.
What results.json holds is kept, unless `--again`. Writes results.json with every plan, plot.png, and the
tables of README.md: the fastest layout of each config on v5e, and every mixer.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import fill

from hyena_jax import config
from hyena_jax.cli.base import script_flags
from hyena_jax.config import MIXER_CONFIGS, Experiment, ParallelConfig
from hyena_jax.plan.compiling import DoesNotCompile, Limits
from hyena_jax.plan.planning import StepPlan, make_plan
from hyena_jax.plan.presentation import CAVEAT, GIB, as_json
from hyena_jax.plan.targets import parse_target
from hyena_jax.sweeps.compare import KIB, state_size
from hyena_jax.sweeps.figure import COLOURS
from hyena_jax.system.errors import UserError
from hyena_jax.system.files import write_text
from hyena_jax.system.machine import describe_machine, describe_versions
from hyena_jax.system.output import bar

FOLDER = Path(__file__).parent
CONFIGS = (
    "wikitext103_hyena_125m:standard",
    "wikitext103_hyena_125m:slim",
    "pile_hyena:153m",
    "pile_hyena:355m",
    "pile_hyena:1p3b",
    "griffin:hawk_1b",
    "griffin:griffin_1b",
    "griffin:griffin_3b",
    "griffin:recurrentgemma_2b",
)
LAYOUTS = {
    "pmap": ParallelConfig(),
    "fsdp 16": ParallelConfig(strategy="sharded", fsdp=16),
    "fsdp 4 x sequence 4": ParallelConfig(strategy="sharded", fsdp=4, sequence=4),
}
LIMITS = Limits(1200, 16 * GIB)
SHOWN = "v5e:4x4"
"""The target of the tables in README.md."""


class Row(NamedTuple):
    """One config on one target in one layout; with `whole`, all its layers compiled, at the same batch."""

    config: str
    target: str
    layout: str
    whole: bool = False
    mixer: str = ""
    """In the place of the config's, with its default options."""

    def experiment(self) -> Experiment:
        experiment = replace(config.load(self.config), parallel=LAYOUTS[self.layout])
        if not self.mixer:
            return experiment
        pattern = (MIXER_CONFIGS[self.mixer](),)
        return replace(experiment, model=replace(experiment.model, pattern=pattern))


# Of what is continued from one and two repeats, three whole programs to compare with.
WHOLE = (
    Row("wikitext103_hyena_125m:standard", "v5e:4x4", "pmap", True),
    Row("pile_hyena:153m", "v5p:2x2x4", "fsdp 16", True),
    Row("griffin:hawk_1b", "v5p:2x2x4", "fsdp 16", True),
)
MIXERS = [Row(CONFIGS[0], SHOWN, "pmap", mixer=name) for name in MIXER_CONFIGS]


@dataclass(frozen=True)
class Flags:
    """Compiles what is missing, and draws and writes everything."""

    only: tuple[str, ...] = ()
    """Parts of configs' and mixers' names; empty: all."""
    targets: tuple[str, ...] = ("v5e:4x4", "v5p:2x2x4")
    again: bool = False
    """Compile what results.json holds, too."""


def main(flags: Flags) -> int:
    path = FOLDER / "results.json"
    found = {}
    if path.exists():
        kept = json.loads(path.read_text())["rows"]
        found = {Row(**{n: v for n, v in each.items() if n in Row._fields}): each["result"] for each in kept}
    targets = dict.fromkeys([*(row.target for row in found), *flags.targets])
    rows = [*(Row(*each) for each in product(CONFIGS, targets, LAYOUTS)), *WHOLE, *MIXERS]
    chosen = [row for row in rows if row.target in flags.targets]
    if flags.only:
        chosen = [row for row in chosen if any(part in (row.mixer or row.config) for part in flags.only)]
    missing = [row for row in chosen if flags.again or row not in found]
    with bar("compiling", len(missing)) as advance:
        for row in missing:
            continued = found.get(row._replace(whole=False), {})
            found[row] = _whole(row, continued["batch_size"]) if row.whole else _largest_that_fits(row)
            report = {
                "command": " ".join(["python", *sys.argv]),
                "caveat": CAVEAT,
                "compiled on": describe_machine(),
                "versions": describe_versions("libtpu"),
                "rows": [row._asdict() | {"result": found[row]} for row in rows if row in found],
            }
            write_text(path, json.dumps(report, indent=1) + "\n")
            advance()
    shown = {row: found[row] for row in rows if row in found}
    tables = {"table": _table(shown), "whole": _comparison(shown), "mixers": _mixers(shown)}
    draw(FOLDER / "plot.png", _fastest(shown))
    for name, lines in tables.items():
        fill(FOLDER / "README.md", name, "\n".join(lines))
    return 0


def _kept(plan: StepPlan) -> dict[str, Any]:
    """A plan as JSON, without its lists of large buffers, exchanges and instructions."""
    lists = ("buffers", "largest_exchanges", "largest")
    return {name: value for name, value in as_json(plan).items() if name not in lists}


def _whole(row: Row, batch_size: int) -> dict[str, Any]:
    """The plan of the whole program."""
    experiment = row.experiment()
    experiment = replace(experiment, data=replace(experiment.data, batch_size=batch_size))
    return _kept(make_plan(experiment, parse_target(row.target), LIMITS, whole=True))


def _largest_that_fits(row: Row) -> dict[str, Any]:
    """The plan with the config's batch, or the largest half of it that fits; or why there is none."""
    target = parse_target(row.target)
    experiment = row.experiment()
    least = target.n_chips // experiment.parallel.sequence
    while True:
        try:
            plan = make_plan(experiment, target, LIMITS, whole=False)
        except (UserError, DoesNotCompile) as error:
            return {"refused": str(error)}
        state = sum(plan.memory_parts[name] for name in ("parameters", "optimizer"))
        # The rest of the memory shrinks with the batch, at most in proportion.
        per_row = plan.memory_parts["rest"] / plan.batch_size
        size = plan.batch_size // 2
        while size > least and state + size * per_row > plan.usable_memory:
            size //= 2
        if plan.fits or state > plan.usable_memory or size < least:
            return _kept(plan)
        experiment = replace(experiment, data=replace(experiment.data, batch_size=size))


def _bracket(plan: dict[str, Any], name: str, form: str, factor: float = 1.0) -> str:
    ends = plan[name]
    return f"{format(factor * ends['roofline'], form)} to {format(factor * ends['pessimistic'], form)}"


def _fastest(found: dict[Row, dict[str, Any]]) -> dict[tuple[str, str], tuple[Row, dict[str, Any]]]:
    """For each config and target, the layout that fits with the most tokens/s a chip at the roofline."""
    fitting = [
        (row, plan) for row, plan in found.items() if plan.get("fits") and not (row.whole or row.mixer)
    ]
    fitting.sort(key=lambda each: each[1]["units_per_second"]["roofline"])
    fastest = {(row.config, row.target): (row, plan) for row, plan in fitting}  # the last of each
    targets = dict.fromkeys(row.target for row in found)
    return {key: fastest[key] for key in product(CONFIGS, targets) if key in fastest}


def _table(found: dict[Row, dict[str, Any]]) -> Iterator[str]:
    """A line for each config, of its fastest layout on SHOWN."""
    yield "| config | parameters | layout | batch | GiB a chip | step, ms | tokens/s a chip | MFU |"
    yield "|---|---:|---|---:|---:|---:|---:|---:|"
    for row, plan in _fastest(found).values():
        if row.target == SHOWN:
            yield (
                f"| `{row.config}` | {plan['n_params'] / 1e6:,.0f} M | {row.layout} | {plan['batch_size']} "
                f"| {plan['memory'] / GIB:.1f} | {_bracket(plan, 'seconds', ',.0f', 1e3)} "
                f"| {_bracket(plan, 'units_per_second', ',.0f')} | {_bracket(plan, 'mfu', '.2f')} |"
            )


def _mixers(found: dict[Row, dict[str, Any]]) -> Iterator[str]:
    """A line for each mixer, the quickest first, by the roofline at the batch that fits."""
    yield "| mixer | parameters | batch | GiB a chip | step, ms | tokens/s a chip | state, KiB |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    plans = {row: plan for row, plan in found.items() if row.mixer}

    def speed(row: Row) -> float:
        return -plans[row]["units_per_second"]["roofline"] if plans[row].get("fits") else 0.0

    for row in sorted(plans, key=speed):
        plan, state = plans[row], state_size(row.experiment().model) / KIB
        if not plan.get("fits"):
            yield f"| `{row.mixer}` | | | {plan.get('refused', 'does not fit')} | | | {state:,.0f} |"
            continue
        yield (
            f"| `{row.mixer}` | {plan['n_params'] / 1e6:,.0f} M | {plan['batch_size']} "
            f"| {plan['memory'] / GIB:.1f} | {_bracket(plan, 'seconds', ',.0f', 1e3)} "
            f"| {_bracket(plan, 'units_per_second', ',.0f')} | {state:,.0f} |"
        )


def _comparison(found: dict[Row, dict[str, Any]]) -> Iterator[str]:
    """How far the plans that were continued from one and two repeats are from the whole programs."""
    pairs = [(found[row._replace(whole=False)], whole) for row, whole in found.items() if row.whole]
    if pairs:
        memory = max(1 - short["memory"] / whole["memory"] for short, whole in pairs)
        ends = product(pairs, ("roofline", "pessimistic"))
        times = max(abs(short["seconds"][end] / whole["seconds"][end] - 1) for (short, whole), end in ends)
        yield f"Of {len(pairs)} plans made both ways, times agree within {times:.1%}, and continued memory is"
        yield f"up to {memory:.0%} too low: below {1 - memory:.0%} of a chip's memory, a plan should fit."


def draw(path: Path, fastest: dict[tuple[str, str], tuple[Row, dict[str, Any]]]) -> None:
    """MFU of each config on each target in its fastest layout, from the pessimistic end to the roofline."""
    configs, targets = (list(dict.fromkeys(key[i] for key in fastest)) for i in range(2))
    figure = Figure(figsize=(8, 1.6 + 0.55 * len(configs)), layout="constrained")
    axes, height = figure.subplots(), 0.8 / len(targets)
    for (config_name, target), (row, plan) in fastest.items():
        n, low, high = targets.index(target), plan["mfu"]["pessimistic"], plan["mfu"]["roofline"]
        y = configs.index(config_name) - 0.4 + (n + 0.5) * height
        axes.barh(y, high - low, 0.9 * height, left=low, color=COLOURS[n])
        axes.text(high + 0.01, y, f"{row.layout}, batch {plan['batch_size']}", va="center", size="small")
    axes.set_yticks(range(len(configs)), configs)
    axes.set(xlim=(0, 1), xlabel=f"MFU of the fastest layout, {CAVEAT}")
    axes.set_title("Estimated: on 16 chips a step reaches 26 to 63% of the peak")
    axes.invert_yaxis()
    handles = [Patch(color=COLOURS[n], label=target) for n, target in enumerate(targets)]
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=len(targets))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main(script_flags(Flags)))
