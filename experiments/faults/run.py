"""Harms real training runs, and checks that they end as if nothing had happened.

python experiments/faults/run.py [--kills 50] [--seed 0] [--workdir runs/faults]
python experiments/faults/run.py --plot-only    # the table in README.md from results.json

Every trial is a scaled-down run of `shakespeare_cpu` in its own process. Writes results.json and the table in
README.md, and prints every fault. Full and read-only disks are mounted in memory, which needs root on Linux;
without root they are not tried, and what is printed says so.
"""

import json
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from fault_folders import folders
from fault_kills import Stage, Trial, kills, starts, stops
from fault_processes import meetings, processes
from fault_runs import HALF, Lab, NotSurvived, demand_same_end
from fault_storage import damages, data_and_rivals, disks, may_mount, permissions
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import fill

from hyena_jax.cli.base import script_flags
from hyena_jax.config.flags import FLAT
from hyena_jax.sweeps.compare import markdown
from hyena_jax.system.machine import describe_machine, describe_versions

HERE = Path(__file__).parent
GROUPS = {
    "SIGKILL of the only process": "SIGKILL .*",
    "SIGTERM, SIGINT or SIGHUP while it trains": "SIG(TERM|INT|HUP)( twice)?",
    "SIGTERM, SIGINT or SIGHUP while it starts": "SIG.* while it starts",
    "checkpoints that are damaged, swapped, copied or of other shapes": (
        "newest checkpoint: .*|.* checkpoints damaged|two steps swapped|a step copied .*|a checkpoint that .*"
    ),
    "a flipped bit in the settings, a torn row of metrics, foreign files": (
        "a bit of the settings|last line .* torn|foreign files .*"
    ),
    "a full disk; a disk, folder or file that cannot be written": "disk full .*|read-only .*|.* be written",
    "links, and checkpoints on another disk": "a link .*|.* is a link|.* another disk",
    "a second training, another text, `train --resume`": (
        "second training .*|two trainings .*|text changed .*|resumed .*"
    ),
    "one of two processes, or their launcher, killed or asked to stop": "one of two .*|.*launcher .*",
    "strangers at the port, and processes that cannot join": (
        "a stranger .*|a process of a number .*|port in use|two processes of one .*|process . does not come"
    ),
}
"""Rows of the table in README.md, and a regular expression for the faults of each."""


@dataclass(frozen=True)
class Counts:
    """How often each fault is tried."""

    kills: int = 50
    """Kills of a run."""
    stops: int = 12
    """Signals that ask a run to stop."""
    starts: int = 12
    """Signals while a run starts."""
    damages: int = 18
    """Damaged checkpoints."""
    full_disks: int = 12
    """Disks that run full."""
    settings: int = 8
    """Flipped bits of a run's settings."""
    processes: int = 8
    """Kills of one of two processes."""


@dataclass(frozen=True)
class Flags:
    """Tries every fault, then writes the results."""

    counts: Counts = field(default=Counts(), metadata=FLAT)
    seed: int = 0
    """Draws moments and places."""
    jobs: int = 2
    """Runs at the same time."""
    workdir: Path = Path("runs/faults")
    """Folder of the runs, emptied first; the folders of survived trials are deleted."""
    out: Path = HERE
    """Folder of results.json."""
    only: tuple[str, ...] = ()
    """Try only the faults whose name contains one of these, and write nothing."""
    each: int | None = None
    """Try each fault at most this often, the first of its trials."""
    plot_only: bool = False
    """Write the table from results.json, and try nothing."""


def main(flags: Flags) -> int:
    if flags.plot_only:
        kept = json.loads((HERE / "results.json").read_text())
        fill(HERE / "README.md", "table", table(kept["faults"]))
        return 0
    console, start = Console(highlight=False), time.perf_counter()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # else runs ignore them behind nohup or `&`
        signal.signal(number, signal.SIG_DFL)
    shutil.rmtree(flags.workdir, ignore_errors=True)
    stage = prepare(Lab(flags.workdir.resolve()).open())
    mounts = may_mount(stage.lab.root / "mount")
    seen = Counter()
    plan = []
    for trial in trials(stage, flags.counts, flags.seed):
        seen[trial.fault] += 1
        is_chosen = not flags.only or any(text in trial.fault for text in flags.only)
        if is_chosen and seen[trial.fault] <= (flags.each or seen[trial.fault]):
            plan.append(trial)
    tried = [trial for trial in plan if mounts or "disk" not in trial.fault]
    results = list(try_all(stage, tried, flags.jobs))
    console.print(on_screen(plan, results))
    for result in results:
        if not result["survived"]:
            console.print(f"{result['fault']}, {result['trial']}: {result['error']}", soft_wrap=True)
    seconds = time.perf_counter() - start
    if not flags.only:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "seconds": round(seconds),
            "hardware": describe_machine(),
            "versions": describe_versions("orbax-checkpoint", "tensorboardX"),
            "faults": summary(plan, results),
            "trials": sorted(results, key=lambda result: (result["fault"], result["trial"])),
        }
        text = json.dumps(report, indent=1).replace(str(stage.lab.root), str(flags.workdir))
        (flags.out / "results.json").write_text(text + "\n")
        if flags.out == HERE:
            fill(HERE / "README.md", "table", table(report["faults"]))
    return 0 if all(result["survived"] for result in results) else 1


def prepare(lab: Lab) -> Stage:
    """The runs to start from and compare with; the second whole run is timed, and shows that runs repeat."""
    lab.train(lab.root / "whole")
    seconds = time_again(lab, "whole", None)
    lab.train(lab.root / "half", steps=HALF)
    pair = ("--num-processes", 2)
    lab.start(lab.root / "together", launch=pair).wait().demand_code(0)
    together_seconds = time_again(lab, "together", pair)
    return Stage(lab, lab.root / "whole", lab.root / "half", seconds, lab.root / "together", together_seconds)


def time_again(lab: Lab, name: str, launch: tuple[object, ...] | None) -> float:
    """Seconds of a repetition of the run `name`, which must end alike."""
    start, workdir = time.perf_counter(), lab.root / f"{name}_again"
    lab.start(workdir, launch=launch).wait().demand_code(0)
    seconds = time.perf_counter() - start
    demand_same_end(workdir, lab.root / name)
    return seconds


def trials(stage: Stage, counts: Counts, seed: int) -> Iterable[Trial]:
    """All trials, in the order of the table."""
    yield from kills(stage, counts.kills, seed)
    yield from stops(stage, counts.stops, seed)
    yield from starts(stage, counts.starts, seed)
    yield from damages(stage, counts.damages, seed)
    yield from disks(stage, counts.full_disks, seed)
    yield from permissions(stage)
    yield from data_and_rivals(stage)
    yield from folders(stage, counts.settings, seed)
    yield from processes(stage, counts.processes, seed)
    yield from meetings(stage)


def try_all(stage: Stage, plan: list[Trial], jobs: int) -> Iterable[dict]:
    """Results in the order in which trials end, under a progress bar."""
    with Progress(console=Console(stderr=True)) as bar, ThreadPoolExecutor(jobs) as pool:
        task = bar.add_task("faults", total=len(plan))
        futures = [pool.submit(attempt, trial, stage.lab.root / f"trial_{i}") for i, trial in enumerate(plan)]
        for future in as_completed(futures):
            bar.advance(task)
            yield future.result()


def attempt(trial: Trial, workdir: Path) -> dict:
    """The result of one trial; any error counts as not survived."""
    start = time.perf_counter()
    result = {"fault": trial.fault, "trial": trial.name, "survived": True}
    try:
        result |= {"notes": trial.run(workdir)}
    except NotSurvived as error:
        result |= {"survived": False, "error": str(error), "workdir": workdir.name}
    except Exception as error:
        result |= {"survived": False, "error": f"{type(error).__name__}: {error}", "workdir": workdir.name}
    if result["survived"]:
        shutil.rmtree(workdir, ignore_errors=True)
    return result | {"seconds": round(time.perf_counter() - start, 1)}


def summary(plan: list[Trial], results: list[dict]) -> dict[str, dict]:
    """For each fault, how often it was tried and survived, and how often its moment was hit."""
    faults = {}
    for fault in dict.fromkeys(trial.fault for trial in plan):
        found = [result for result in results if result["fault"] == fault]
        faults[fault] = {"tried": len(found), "survived": sum(result["survived"] for result in found)}
        hits = [result["notes"]["hit"] for result in found if "hit" in result.get("notes", {})]
        if hits:
            faults[fault]["hit"] = sum(hits)
    return faults


def table(faults: dict[str, dict]) -> str:
    """The summary for the page: a row for each of GROUPS, and for each fault that is in none."""
    sums = {group: Counter() for group in GROUPS}
    for fault, counts in faults.items():
        group = next((name for name, form in GROUPS.items() if re.fullmatch(form, fault)), fault)
        sums.setdefault(group, Counter()).update(counts)
    rows = [(group, [f"{counts['survived']} / {counts['tried']}"]) for group, counts in sums.items()]
    return "\n".join(markdown("fault", ["survived / tried"], rows))


def on_screen(plan: list[Trial], results: list[dict]) -> Table:
    """The summary as a table for the screen."""
    rows = Table("fault", "survived / tried", "moment hit", box=None)
    for fault, counts in summary(plan, results).items():
        ratio = f"{counts['survived']} / {counts['tried']}" if counts["tried"] else "not tried: needs a mount"
        rows.add_row(fault, ratio, str(counts.get("hit", "")))
    return rows


if __name__ == "__main__":
    sys.exit(main(script_flags(Flags)))
