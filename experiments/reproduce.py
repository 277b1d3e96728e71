"""Runs the experiments on tasks whose results are missing or older than their settings, and writes README.md.

python experiments/reproduce.py [--only recall_by_mixer copying ...] [--jobs 2] [--minutes 60] [--quick]
python experiments/reproduce.py --stale
python experiments/reproduce.py --scale paper

Results with the digest of the present settings, made by the present protocol, are kept. The page
`experiments/README.md` is never edited by hand: it lists all experiments, and shows the figures of those on
tasks.
"""

import functools
import runpy
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import protocol
from pages import groups_of, rank_correlation, verdict
from protocol import ended_after, n_rows
from results import faults_in_a_line
from study import Scale, Study, digest, results_of, run

from hyena_jax.cli.base import script_flags
from hyena_jax.sweeps.runs import without_seed
from hyena_jax.system.errors import UserError, choose
from hyena_jax.system.files import write_text

HERE = Path(__file__).parent
STUDIES = (
    "recall_by_mixer",
    "recall_by_filter",
    "mqar_state",
    "state_tracking",
    "word_problems",
    "copying",
    "string_copying",
    "extrapolation",
    "mad",
)


@dataclass(frozen=True)
class Flags:
    """Trains what is missing, one experiment after the other, and writes the page."""

    only: tuple[str, ...] = STUDIES
    """The experiments to run."""
    workdir: Path = Path("runs")
    """Folder of the runs, one folder for each experiment."""
    jobs: int = 1
    """Runs that are trained at the same time."""
    minutes: float | None = None
    """Stop after so many; the same command continues."""
    quick: bool = False
    """A few steps of some runs of each, whose results stay in workdir."""
    stale: bool = False
    """Train nothing but the first steps of one run a group, and list what differs from the results."""
    scale: Scale = "here"
    """`here` is a size for two CPU cores, `paper` the settings of the sources that give them in full, for
    an accelerator."""


def main(flags: Flags) -> None:
    faults: list[str] = []
    with faults_in_a_line():
        for name in flags.only:
            choose("only", name, dict.fromkeys(STUDIES))
        studies = {name: load(name) for name in flags.only}
        if flags.scale == "paper":
            chosen = {name: study for name, study in studies.items() if study.paper or flags.only != STUDIES}
            studies = {f"{name}/paper": study.at_paper_scale() for name, study in chosen.items()}
        if flags.stale:
            sys.exit(1 if list_stale(studies) else 0)
        with ended_after(flags.minutes):
            for name, study in studies.items():
                folder = flags.workdir / (f"{name}_quick" if flags.quick else name)
                groups = missing(study)
                if not flags.quick and not groups:
                    print(f"{name}: up to date")
                    continue
                print(f"{name}: {cost(study, groups)}")
                has_others = len(groups) < len({*map(without_seed, study.runs)})
                try:
                    run(study, folder, flags.jobs, flags.quick, groups if has_others else ())
                except UserError as error:  # the other experiments may not have its fault
                    faults.append(f"{name}: {error}")
        if not flags.quick:
            write_text(HERE / "README.md", page([load(name) for name in STUDIES]))
        if faults:
            raise UserError("; ".join(faults))


def list_stale(studies: Mapping[str, Study]) -> bool:
    """Prints, page by page, what the present code does not repeat; returns whether there was anything."""
    found = False
    for name, study in studies.items():
        results = results_of(study)
        for line in ["not run yet"] if results is None else protocol.stale(study, results):
            print(f"{name}: {line}", flush=True)
            found = True
    return found


def missing(study: Study) -> list[str]:
    """The groups without results of the present protocol; all of them if settings have changed."""
    kept = results_of(study)
    if kept is None or kept["digest"] != digest(study, kept["runs"]):
        return [*dict.fromkeys(map(without_seed, study.runs))]
    rows = kept["runs"]
    names = [name for name in study.runs if "learning_rate" not in rows.get(name, {})]
    return [*dict.fromkeys(map(without_seed, names))]


def cost(study: Study, groups: Collection[str]) -> str:
    """What training these groups costs, in words: its rows, and the hours that all kept results took."""
    runs = [run for name, run in study.runs.items() if without_seed(name) in groups]
    rows = sum(n_rows(run, run.training.steps) for run in runs)
    kept = results_of(study)
    took = "" if kept is None else f"; the kept results took {seconds(kept) / 3600:.1f} h"
    return f"{len(runs)} of {len(study.runs)} runs, of at most {rows:,} rows in all, and their searches{took}"


def seconds(results: Mapping[str, Any]) -> float:
    """What all commands took that made these results."""
    return sum(made["seconds"] for made in (results, *results.get("later", [])))


@functools.cache
def load(name: str) -> Study:
    """The study of an experiment."""
    return runpy.run_path(str(HERE / name / "run.py"))["STUDY"]


def page(studies: list[Study]) -> str:
    """The page of all experiments, in Markdown."""
    link = "[{}]({}/README.md)"
    lines = [
        "# Experiments\n",
        "Each folder holds its command, its results with hardware and versions, and its figures.",
        "`python experiments/reproduce.py` trains what the first table lacks, and writes this page; with",
        "`--scale paper` it takes the settings of the sources, as far as these give them in full, and",
        "needs an accelerator.\n",
        "## Against published results\n",
        "An ordering is what the paper or we expect, such as one mixer above another; some were added or",
        "split when earlier results were known. It is compared at the N rows of its runs, and holds if each",
        "group has three seeds, the lowest seed of the first side is above the highest of the second, and",
        "the first side was not trained on more rows. It holds also at 2N if that seed is above one run of",
        "twice the rows of every group of the second side. Values that solve the task count as equal.",
        "Spearman's correlation compares our medians with the published values, at finished groups of all",
        "settings together.",
        "Minutes are those of all runs, divided by the number that were trained at the same time, on two",
        "CPU cores of the machines that each page names.\n",
        "| experiment | expected orderings | Spearman's correlation | runs | minutes |",
        "|---|---|---:|---:|---:|",
    ]
    figures = []
    for study in studies:
        results = results_of(study)
        if results is None:
            lines.append(f"| {study.title} | not run yet | | {len(study.runs)} | |")
            continue
        groups = groups_of(study, results)
        correlation = rank_correlation(study, groups)
        shown = "" if correlation is None else f"{correlation[0]:.2f} ({correlation[1]} values)"
        minutes = f"{seconds(results) / 60:.0f}"
        linked = link.format(study.title, study.folder.name)
        cells = [linked, verdict(study, groups), shown, str(len(results["runs"])), minutes]
        lines.append(f"| {' | '.join(cells)} |")
        figures.append(f"![{study.title}]({study.folder.name}/plot.png)\n")
    others = sorted(path.parent for path in HERE.glob("*/README.md") if path.parent.name not in STUDIES)
    lines += ["", *figures, "## All others\n"]
    for folder in others:
        title = (folder / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- {link.format(title, folder.name)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(script_flags(Flags))
