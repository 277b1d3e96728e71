"""Runs the experiments on tasks whose results are missing or older than their settings, and writes README.md.

python experiments/reproduce.py [--only recall_by_mixer copying ...] [--jobs 2] [--quick]

Results with the digest of the present settings are kept. The page `experiments/README.md` is never edited by
hand: it lists all experiments, and shows the figures of those on tasks.
"""

import json
import runpy
import sys
from pathlib import Path

import tyro
from study import FAULTS, Study, describe, digest, groups_of, rank_correlation, run, verdict, write

from hyena_jax.config import UserError, choose
from hyena_jax.files import write_text

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


def main(
    only: tuple[str, ...] = STUDIES, workdir: Path = Path("runs"), jobs: int = 1, quick: bool = False
) -> None:
    """Trains what is missing, one experiment after the other, and writes the page.

    Args:
      only: the experiments to run.
      workdir: folder of the runs, one folder for each experiment.
      jobs: runs that are trained at the same time.
      quick: a few steps of some runs of each, whose results stay in workdir.
    """
    faults: list[str] = []
    try:
        for name in only:
            choose("only", name, dict.fromkeys(STUDIES))
        for name in only:
            study = load(name)
            folder = workdir / (f"{name}_quick" if quick else name)
            if not quick and (kept := results_of(study)) is not None and kept["digest"] == digest(study):
                print(f"{name}: up to date")
                continue
            print(f"{name}:")
            try:
                results = run(study, folder, jobs, quick)
            except UserError as error:  # the other experiments may not have its fault
                faults.append(f"{name}: {error}")
                continue
            if not quick:
                write(study, study.folder, results)
        if not quick:
            write_text(HERE / "README.md", page([load(name) for name in STUDIES]))
    except FAULTS as error:
        sys.exit(describe(error))
    if faults:
        sys.exit(f"error: {'; '.join(faults)}")


def load(name: str) -> Study:
    """The study of an experiment."""
    return runpy.run_path(str(HERE / name / "run.py"))["STUDY"]


def results_of(study: Study) -> dict | None:
    """The results that are kept in a study's folder."""
    path = study.folder / "results.json"
    return json.loads(path.read_text()) if path.exists() else None


def page(studies: list[Study]) -> str:
    """The page of all experiments, in Markdown."""
    link = "[{}]({}/README.md)"
    lines = [
        "# Experiments\n",
        "Each folder holds its command, its results with hardware and versions, and its figures.",
        "`python experiments/reproduce.py` trains what the first table lacks, and writes this page.\n",
        "## Against published results\n",
        "An ordering is what the paper leads one to expect, such as one mixer above another; it holds if the",
        "medians over seeds are in that order. The correlation is that of our values with those published.",
        "The minutes are those of two CPU cores, which each page names.\n",
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
        minutes = f"{results['seconds'] / 60:.0f}"
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
    tyro.cli(main, description=__doc__)
