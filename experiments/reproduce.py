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

import protocol
from pages import groups_of, orderings, seconds
from pages import verdict as verdict_of
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
    "recall",
    "state_tracking",
    "word_problems",
    "copying",
    "string_copying",
    "extrapolation",
    "mad",
)

EXPECTED = "our expectation"
CLAIMS = (
    ("recall", 6, "Mamba-2 with more state learns more of 8 pairs", "Mamba-2, a figure"),
    (
        "recall",
        0,
        "In 3,000 steps attention learns more of 32 pairs than Mamba-2",
        f"{EXPECTED}; Mamba-2's figure has the reverse",
    ),
    ("recall", 5, "A delta rule with more state learns more of 8 pairs", EXPECTED),
    ("recall", 3, "Attention learns more of 32 pairs than RWKV-7 and a delta rule", EXPECTED),
    ("recall", 1, "RWKV-7 learns more of 32 pairs than Mamba-2", EXPECTED),
    ("recall", 2, "A gated delta rule learns more of 32 pairs than Mamba-2", EXPECTED),
    ("recall", 4, "Mamba-2 learns more of 8 pairs than Hawk and Hyena", EXPECTED),
    ("recall", 7, "In 1,000 steps attention recalls 8 pairs only behind a convolution", EXPECTED),
    ("recall_by_mixer", 3, "Hyena recalls among 30 symbols where H3 does not", "0.98 against 0.13"),
    ("recall_by_mixer", 2, "Hyena recalls among 20 symbols where H3 does not", "1.00 against 0.60"),
    (
        "recall_by_mixer",
        0,
        "Among 20 symbols Hyena, H3 and attention beat AFT and a convolution without gates",
        "0.60 against 0.21",
    ),
    (
        "recall_by_filter",
        0,
        "In 16,000 rows implicit filters beat taps and state-space filters at recall",
        "only these recall, at 131,072 tokens",
    ),
    (
        "recall_by_filter",
        1,
        "In 16,000 rows implicit filters beat CKConv's at recall",
        "only these recall, at 131,072 tokens",
    ),
    ("state_tracking", 0, "Factors down to -1 let a delta rule track parity", "proved"),
    (
        "state_tracking",
        1,
        "Factors down to -1 track parity; recurrences without, attention and Hyena do not",
        "proved of recurrences, for long rows",
    ),
    ("state_tracking", 2, "Mamba-3 tracks parity, Mamba-2 does not", "Mamba-3: it does"),
    (
        "word_problems",
        0,
        "Two factors per token track permutations of three",
        "a figure: one factor does not",
    ),
    ("word_problems", 2, "Mamba-3 tracks permutations of three, Mamba-2 does not", EXPECTED),
    ("copying", 0, "Hyena and S4D learn to copy sooner than Hawk", EXPECTED),
    ("string_copying", 0, "Hard-ALiBi copies longer strings than rotary positions", "many times as long"),
    ("string_copying", 1, "Hard-ALiBi copies longer strings than Mamba-2", "longer than Mamba"),
    (
        "extrapolation",
        0,
        "Hawk and a delta rule solve longer induction rows than attention",
        "Griffin, a figure of Hawk",
    ),
    (
        "extrapolation",
        1,
        "Mamba-2 solves longer induction rows than attention",
        "Mamba: to 4,096 times as long",
    ),
    ("extrapolation", 2, "Hawk and a delta rule copy from longer rows than attention", EXPECTED),
    ("extrapolation", 3, "Mamba-2 copies from longer rows than attention", EXPECTED),
)
"""Study, the number of its expected ordering, the claim, and what the source has (words or accuracies)."""


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


@functools.cache
def load(name: str) -> Study:
    """The study of an experiment."""
    return runpy.run_path(str(HERE / name / "run.py"))["STUDY"]


def page(studies: list[Study]) -> str:
    """The page of all experiments, in Markdown."""
    link = "[{}]({}/README.md)"
    kept = {study.folder.name: (study, results_of(study)) for study in studies}
    found = {
        name: orderings(study, groups_of(study, results))
        for name, (study, results) in kept.items()
        if results is not None
    }
    lines = [
        "# Experiments\n",
        "Claims of papers, and our expectations, in runs that take minutes each on two CPU cores.",
        "`worst against best` is the lowest of three seeds of the expected winner against the highest of the",
        "others; `medians` has both in their median run.\n",
        "| claim | worst against best | medians | in the source | verdict |",
        "|---|---|---|---|---|",
    ]
    for name, number, claim, source in CLAIMS:
        if name in found:
            one = found[name][number]
            verdict = "*as expected*" if source.startswith(EXPECTED) else "*agrees*"
            verdict += ", also at twice the rows" if one.how.endswith("2N") else ""
            if one.how == "not shown":
                verdict = f"*does not show here*: {one.why.partition(':')[0]}"
            cells = (link.format(claim, name), one.here, one.medians, source, verdict)
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| | | |", "|---|---|---|"]
    pictures = [f'<img src="{name}/plot.png" width="280" alt="{kept[name][0].message}">' for name in found]
    for i in range(0, len(pictures), 3):
        lines.append(f"| {' | '.join(pictures[i : i + 3])} |")
    lines += [
        "",
        "## How it was made\n",
        "A beats B if each model was trained with three seeds, A's worst seed is at least 0.02 better than",
        "B's best, and A read no more rows than B; each page gives their number N. It also holds at twice",
        "the rows (2N) if A's worst seed beats one run of each model of B at 2N rows. Where all models",
        "solve the task, the steps that they needed are compared. The learning rate of a mixer is the best",
        "of at least three, a factor of 3.2 apart, tried with a seed of their own in a quarter of the steps;",
        "best by loss, or by accuracy where the page says so. A best rate at the edge adds a rate, up to",
        "five; some searches still end at an edge, as their results.json shows. Recall of pairs tries rates",
        "at full length, anew for each number of pairs; at 8 pairs the best trial is one of the seeds.\n",
        "Pictures: bars and lines are medians, small dots seeds, diamonds published values, dashed lines",
        "variants of a mixer, dotted lines chance or the longest length in training.\n",
        "`python experiments/reproduce.py` trains what is missing and writes this page; `--scale paper` has",
        "the settings of the sources and needs an accelerator.\n",
        "| experiment | expected orderings | runs | minutes |",
        "|---|---|---:|---:|",
    ]
    for name, (study, results) in kept.items():
        cells = ["not run yet", str(len(study.runs)), ""]
        if results is not None:
            cells = [verdict_of(study, groups_of(study, results)), str(len(results["runs"])), ""]
            cells[2] = f"{seconds(results) / 60:.0f}"
        lines.append(f"| {link.format(study.title, name)} | {' | '.join(cells)} |")
    others = sorted(path.parent for path in HERE.glob("*/README.md") if path.parent.name not in STUDIES)
    lines += ["", "## All others\n"]
    for folder in others:
        title = (folder / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- {link.format(title, folder.name)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(script_flags(Flags))
