"""What the training steps of all paper-size configs take on TPUs, estimated by compiling them ahead of time.

python experiments/tpu/run.py [--only hawk ...] [--targets v5e:4x4 ...] [--again]

Every config and variant, on 16 chips of v5e and of v5p: with pmap, with parameters sharded over 16 chips, and
with parameters and sequences each sharded over 4. If the config's batch does not fit, halves of it are tried.
Plans that results.json holds are kept, unless `--again`. Writes results.json, plot.png and README.md's table.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure

from hyena_jax import config
from hyena_jax.benchmark.machine import describe_machine, describe_versions
from hyena_jax.config import ParallelConfig, UserError
from hyena_jax.plan.compiling import DoesNotCompile, Limits
from hyena_jax.plan.planning import make_plan
from hyena_jax.plan.report import CAVEAT, GIB, as_json
from hyena_jax.plan.targets import parse_target
from hyena_jax.training.atomic import write_text
from hyena_jax.training.progress import bar

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


@dataclass(frozen=True)
class Row:
    """One config on one target in one layout."""

    config: str
    target: str
    layout: str


def main(
    only: tuple[str, ...] = (), targets: tuple[str, ...] = ("v5e:4x4", "v5p:2x2x4"), again: bool = False
) -> int:
    """Compiles what is missing, and draws and writes everything.

    Args:
      only: parts of configs' names; empty: all.
      again: compile what results.json holds, too.
    """
    path = FOLDER / "results.json"
    found = {} if not path.exists() else {_key(each): each for each in json.loads(path.read_text())["rows"]}
    rows = [
        Row(name, target, layout)
        for name in CONFIGS
        if not only or any(part in name for part in only)
        for target in targets
        for layout in LAYOUTS
    ]
    missing = [row for row in rows if again or (row.config, row.target, row.layout) not in found]
    with bar("compiling", len(missing)) as advance:
        for row in missing:
            found[row.config, row.target, row.layout] = asdict(row) | _largest_that_fits(row)
            report = {
                "command": " ".join(["python", *sys.argv]),
                "caveat": CAVEAT,
                "compiled on": describe_machine(),
                "versions": describe_versions("libtpu"),
                "rows": list(found.values()),
            }
            write_text(path, json.dumps(report, indent=1) + "\n")
            advance()
    results = json.loads(path.read_text())
    order = {
        (c, t, x): i
        for i, (c, t, x) in enumerate((c, t, x) for c in CONFIGS for t in targets for x in LAYOUTS)
    }
    kept = sorted((each for each in results["rows"] if _key(each) in order), key=lambda row: order[_key(row)])
    draw(FOLDER / "plot.png", kept)
    readme = FOLDER / "README.md"
    table = "\n".join(("<!-- table -->", *_table(kept), "<!-- end -->"))
    write_text(
        readme, re.sub(r"<!-- table -->.*<!-- end -->", lambda _: table, readme.read_text(), flags=re.S)
    )
    return 0


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["config"], row["target"], row["layout"]


def _largest_that_fits(row: Row) -> dict[str, Any]:
    """The plan with the config's batch, or the largest half of it that fits; or why there is none."""
    target = parse_target(row.target)
    experiment = replace(config.load(row.config), parallel=LAYOUTS[row.layout])
    least = target.n_chips // experiment.parallel.sequence
    while True:
        try:
            plan = make_plan(experiment, target, (), LIMITS, whole=False)
        except (UserError, DoesNotCompile) as error:
            return {"refused": str(error)}
        state = sum(plan.memory_parts[name] for name in ("parameters", "optimizer"))
        size = plan.batch_size // 2
        # The rest of the memory shrinks with the batch, at most in proportion.
        while (
            size > least and state + plan.memory_parts["rest"] * size / plan.batch_size > plan.usable_memory
        ):
            size //= 2
        if plan.fits or state > plan.usable_memory or size < least:
            return {"plan": as_json(plan)}
        experiment = replace(experiment, data=replace(experiment.data, batch_size=size))


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    columns = ("config", "chips", "layout", "batch", "parameters", "GiB a chip", "exchanged, GB", "step, ms")
    columns += ("tokens/s a chip", "MFU")
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        start = f"| `{row['config']}` | {row['target']} | {row['layout']}"
        if "refused" in row:
            yield f"{start} | refused: {row['refused']} | | | | | | |"
            continue
        plan = row["plan"]
        received = sum(each["received"] for each in plan["exchanges"])
        ratio = received / plan["needed_exchange"] if plan["needed_exchange"] else 0
        memory = f"{plan['memory'] / GIB:.1f}" + ("" if plan["fits"] else ", does not fit")

        def bracket(name: str, form: str, factor: float = 1.0, plan: dict = plan) -> str:
            ends = plan[name]
            return (
                f"{format(factor * ends['roofline'], form)} to {format(factor * ends['pessimistic'], form)}"
            )

        yield (
            f"{start} | {plan['batch_size']} | {plan['n_params'] / 1e6:,.0f} M | {memory} "
            f"| {received / 1e9:.2f} ({ratio:.2f} x) | {bracket('seconds', ',.0f', 1e3)} "
            f"| {bracket('units_per_second', ',.0f')} | {bracket('mfu', '.2f')} |"
        )


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """MFU of each config that fits, a bar from the pessimistic to the roofline end."""
    fitting = [row for row in rows if "plan" in row and row["plan"]["fits"]]
    targets = list(dict.fromkeys(row["target"] for row in fitting))
    figure = Figure(
        figsize=(12, 1.2 + 0.28 * max(len(fitting) / max(len(targets), 1), 4)), layout="constrained"
    )
    figure.suptitle(f"MFU of a training step on 16 chips, {CAVEAT}", fontsize="medium")
    colours = dict(zip(LAYOUTS, ("#0072B2", "#D55E00", "#009E73"), strict=True))
    for axes, target in zip(figure.subplots(1, len(targets), squeeze=False)[0], targets, strict=True):
        here = [row for row in fitting if row["target"] == target]
        for i, row in enumerate(here):
            mfu = row["plan"]["mfu"]
            low, high = mfu["pessimistic"], mfu["roofline"]
            axes.barh(i, high - low, left=low, color=colours[row["layout"]])
        axes.set_yticks(
            range(len(here)), [f"{row['config']}, batch {row['plan']['batch_size']}" for row in here]
        )
        axes.tick_params(axis="y", labelsize="small")
        axes.set(title=target, xlim=(0, 1), xlabel="from the pessimistic end to the roofline")
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
    for layout, colour in colours.items():
        axes.barh([0], [0], color=colour, label=layout)
    axes.legend(fontsize="small", frameon=False, loc="lower right")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
