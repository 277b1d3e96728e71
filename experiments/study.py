"""What the experiments on tasks share: a `Study` describes runs, `protocol` makes them, `pages` shows them.

Each is a folder with a `run.py` that describes a `Study` and calls `main`:

    python experiments/NAME/run.py [--only pattern=hyena ...] [--jobs 2] [--minutes 60] [--quick]
    python experiments/NAME/run.py --scale paper

Started again, it continues. Results go to results.json, plot.png and README.md in the folder of the
experiment; those of the paper's own setting, for hardware with an accelerator, to its folder `paper`; with
`--quick`, a check of a minute, to a folder of runs.
"""

import dataclasses
import hashlib
import json
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pages
import protocol
from results import faults_in_a_line

import hyena_jax
from hyena_jax.cli.base import script_flags
from hyena_jax.config import Experiment, TaskConfig, TrainingConfig
from hyena_jax.sweeps.runs import without_seed
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import write_text

HERE = Path(__file__).parent
GATED_TAPS = (
    *("--model.pattern.0.filter", "short", "--model.pattern.0.filter.n-taps", "4"),
    *("--model.pattern.0.short-filter-len", "0", "--no-model.pattern.0.skip"),
)
"""Hyena as a gated convolution of four taps, the length of the short filters within the delta rules."""
Scale = Literal["here", "paper"]
"""At a size for two CPU cores, or at that of the source."""


@dataclass(frozen=True)
class Study:
    """An experiment: runs that differ in a few settings, and what is known about them.

    A run's name lists its settings, `pattern=hyena,vocab_size=10,seed=0`; runs that differ only in their seed
    are a group, named without it.
    """

    folder: Path
    title: str
    source: str
    """Paper, with the table or figure."""
    message: str
    """What came out, in one sentence without a full stop: the first of the page, and the figure's title."""
    claim: str
    """What the source says, and what is measured here instead, in Markdown."""
    runs: Mapping[str, Experiment]
    """Each at its mixer's own learning rate, from which the search of a better one begins."""
    metric: str
    solved: float
    """A run with at least this value has solved its task."""
    chance: float | None = None
    """What a guess reaches, for the figure."""
    paper_rows: str = ""
    """The rows that the source trains on, in words; empty if it does not say."""
    search_part: int = 4
    """Rates are searched at this part of the steps, one in so many."""
    searched_at: Callable[[str], str] = str
    """The group at whose settings a group's learning rate is searched; by default its own."""
    published: Mapping[str, float] = field(default_factory=dict)
    """Published values by group, as fractions; groups that were not published are missing."""
    published_at: str = "published"
    """What the picture says of these values: the setting that they are from, where it is another."""
    above: Sequence[tuple[Sequence[str], Sequence[str]]] = ()
    """Expected orderings: each of the first groups has a higher median than each of the second."""
    above_at: int | None = None
    """The test length at which they are expected; None takes the evaluation during training."""
    lengths: Mapping[int, Callable[[TaskConfig], TaskConfig]] = field(default_factory=dict)
    """Further lengths to evaluate at, of which the first is the longest in training: how the data change."""
    unit: str = "tokens"
    """What the test lengths count."""
    n_scored: Callable[[int], int] | None = None
    """The scored positions of a row of a test length. If given, the value at a length is that of the
    positions beyond the length before it, the first of which is that of training; median, range and
    orderings are those `above_at`. Rows of two lengths are drawn apart: it has the errors of both.
    """
    evaluated: str = "rows of the training length"
    """The rows of the evaluation during training, from which median, range and solved runs are taken."""
    x: str | None = None
    """The setting on the horizontal axis, or `length`; None draws a bar for each group."""
    drawn: Collection[str] = ()
    """The lines of the figure, at most seven, by their labels; empty for all."""
    shown: Sequence[str] = ()
    """The groups of the page's table, at most ten; empty for the first of all."""
    findings: str = ""
    """What more came out, in a few sentences of Markdown: the reasons, not the numbers of the table."""
    limits: str = ""
    """What the study does not show, in at most three sentences."""
    paper: Mapping[str, Any] = field(default_factory=dict)
    """The fields that differ at the setting of the source; empty where it does not give that in full.

    `runs` is a function there, as making hundreds takes seconds.
    """

    def at_paper_scale(self) -> "Study":
        """The study at the setting of the source, with results of its own.

        Raises:
          UserError: if the source does not give its setting in full.
        """
        allowed = f"here: the source of {self.folder.name} does not give its setting in full"
        require(bool(self.paper), "scale", "paper", allowed)
        title = f"{self.title}, at the setting of the source"
        own = {"title": title, "searched_at": str, "shown": (), "drawn": (), "findings": "", "limits": ""}
        changed = {**own, **self.paper, "runs": self.paper["runs"]()}
        return dataclasses.replace(self, **changed, paper={}, folder=self.folder / "paper")

    @property
    def command(self) -> list[str]:
        """The command that trains it, without its flags."""
        name, *scale = self.folder.relative_to(HERE).parts
        return ["python", f"experiments/{name}/run.py", *(["--scale", *scale] if scale else [])]


@dataclass(frozen=True)
class Flags:
    """Trains what is missing of an experiment, and writes results.json, plot.png and README.md."""

    workdir: Path | None = None
    """Folder of the runs; None takes `runs/` and the name of the experiment."""
    scale: Scale = "here"
    """`here` is a size for two CPU cores, `paper` the setting of the source, for an accelerator."""
    only: tuple[str, ...] = ()
    """Names of groups, or settings such as `pattern=hyena`: these groups, or those with one of the settings,
    are trained, in a part of `workdir` of their own, at the rates that were found before; all others keep
    their results."""
    jobs: int = 1
    """Runs that are trained at the same time."""
    minutes: float | None = None
    """Stop after so many; the same command continues."""
    quick: bool = False
    """A few steps of the first runs, whose results stay in WORKDIR_quick."""
    plot_only: bool = False
    """Draw and write from results.json, and train nothing."""


def main(study: Study) -> None:
    """The command line of an experiment."""
    flags = script_flags(Flags)
    with faults_in_a_line(), protocol.ended_after(flags.minutes):
        chosen = study.at_paper_scale() if flags.scale == "paper" else study
        folder = flags.workdir or Path("runs") / chosen.folder.relative_to(HERE)
        if not flags.plot_only:
            folder = Path(f"{folder}_quick") if flags.quick else folder
            run(chosen, folder, flags.jobs, flags.quick, flags.only)
        elif not flags.quick:
            write(chosen, chosen.folder, json.loads((chosen.folder / "results.json").read_text()))


def run(study: Study, workdir: Path, jobs: int, quick: bool, only: Sequence[str] = ()) -> dict[str, Any]:
    """Trains and evaluates what is missing; writes the results and the page, and returns the results."""
    began = time.monotonic()
    groups = chosen_groups(study, only)
    if only:  # a sweep is continued with all of its runs: other groups have another
        workdir = workdir / hashlib.sha256(";".join(sorted(groups)).encode()).hexdigest()[:8]
    if quick:
        runs = {name: run for name, run in study.runs.items() if without_seed(name) in groups}
        study = dataclasses.replace(study, runs=shortened(runs), searched_at=str)
        groups = {without_seed(name) for name in study.runs}
    kept = results_of(study) if only and not quick else None
    if kept is not None and kept["digest"] != digest(study, kept["runs"]):
        raise UserError(f"{study.folder.name}/results.json is of other settings; train all, without --only")
    command = [*study.command, *(["--only", *only] if only else []), "--jobs", str(jobs)]
    known = {} if kept is None else searches_of(kept)
    results = {"command": shlex.join(command), **protocol.measure(study, workdir, jobs, groups, known)}
    if kept is not None:
        results = joined(kept, results)
        in_order = {name: results["runs"][name] for name in study.runs if name in results["runs"]}
        results = {**results, "runs": in_order}
    results = {**results, "digest": digest(study, results["runs"])}
    groups = pages.groups_of(study, results)
    print(f"{len(results['runs'])} runs, {time.monotonic() - began:.0f} s; {pages.verdict(study, groups)}")
    write(study, workdir if quick else study.folder, results)
    return results


def chosen_groups(study: Study, only: Sequence[str]) -> set[str]:
    """The groups that have one of the settings in `only`, or are named there; without any, all.

    Raises:
      UserError: for settings that no group has.
    """
    groups = dict.fromkeys(map(without_seed, study.runs))
    if not only:
        return {*groups}
    found = {
        wanted: {wanted}
        if wanted in groups
        else {g for g in groups if {*wanted.split(",")} <= {*g.split(",")}}
        for wanted in only
    }
    for wanted, some in found.items():
        require(bool(some), "only", wanted, f"settings of a group, such as {', '.join(list(groups)[:3])}")
    return set().union(*found.values())


def results_of(study: Study) -> dict[str, Any] | None:
    """The results that are kept in a study's folder."""
    path = study.folder / "results.json"
    return json.loads(path.read_text()) if path.exists() else None


def searches_of(kept: Mapping[str, Any]) -> dict[str, dict[float, float | None]]:
    """The losses by learning rate in kept results."""
    return {
        group: {float(rate): loss for rate, loss in searched["losses"].items()}
        for group, searched in kept.get("search", {}).items()
        if "losses" in searched
    }


def joined(kept: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Kept results with those of other groups, which say in `later` when, where and how they were made."""
    groups = [*dict.fromkeys(map(without_seed, new["runs"]))]
    later = {"groups": groups, **{name: new[name] for name in ("command", "seconds", "hardware", "versions")}}
    earlier = [
        {**one, "groups": [name for name in one["groups"] if name not in groups]}
        for one in kept.get("later", [])
    ]
    parts = {"search": {**kept.get("search", {}), **new["search"]}}
    for part in ("runs", "longer"):  # of a group that is made anew nothing old stays
        others = {name: row for name, row in kept.get(part, {}).items() if without_seed(name) not in groups}
        parts[part] = {**others, **new[part]}
    of_commands = [*(one for one in earlier if one["groups"]), later]
    made_later = {name for one in of_commands for name in one["groups"]}
    if made_later >= {without_seed(name) for name in parts["runs"]}:  # nothing of the first command is left
        first, *of_commands = of_commands
        kept = {**kept, **{name: first[name] for name in ("command", "seconds", "hardware", "versions")}}
    return {**kept, **parts, "later": of_commands}


def write(study: Study, folder: Path, results: Mapping[str, Any]) -> None:
    """Writes the results, the figure and the page."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    pages.draw(study, pages.groups_of(study, results), folder / "plot.png")
    write_text(folder / "README.md", pages.page(study, results))


def task_runs(
    group: str, task: str, pattern: str, seeds: Sequence[int], flags: Sequence[str] = ()
) -> dict[str, Experiment]:
    """A group of runs of `tasks:TASK` with other mixers; attention alone has one head and learned positions.

    Args:
      group: the name of the group, with which the names of the runs begin.
      flags: settings of the runs; they may choose attention's heads, and positions.
    """
    is_bare = pattern == "attention" and "--model.pattern.0.n-heads" not in flags
    own = ["--model.pattern.0.n-heads", "1"] if is_bare else []
    if not any(flag.endswith("model.learned-positions") for flag in flags):
        own += ["--model.learned-positions" if pattern == "attention" else "--no-model.learned-positions"]
    runs = hyena_jax.make_runs(f"tasks:{task}", {"model.pattern": [pattern], "seed": seeds}, [*own, *flags])
    return {f"{group},seed={run.seed}": run for run in runs.values()}


def model_runs(
    task: str, models: Mapping[str, tuple[str, Sequence[str]]], seeds: Sequence[int], flags: Sequence[str]
) -> dict[str, Experiment]:
    """The groups `model=NAME` of models that are given by their mixer and its flags."""
    runs: dict[str, Experiment] = {}
    for name, (mixer, own) in models.items():
        runs |= task_runs(f"model={name}", task, mixer, seeds, [*flags, *own])
    return runs


def budget(steps: int, eval_every: int, until: str | None = None, save_every: int | None = None) -> list[str]:
    """Flags of the training; it stops early once it has reached `until`, such as `accuracy=0.99`."""
    flags = ["--training.steps", str(steps), "--training.eval-every", str(eval_every)]
    flags += ["--training.checkpoint-every", str(save_every or steps)]
    return flags if until is None else [*flags, "--training.until", until]


def of_length(length: int, data: TaskConfig) -> TaskConfig:
    """Examples of exactly that length to evaluate on; some tasks have one length, others a range."""
    if hasattr(data, "test_seq_len"):
        return dataclasses.replace(data, test_seq_len=length)
    return dataclasses.replace(data, test_min_len=length, test_max_len=length)


def digest(study: Study, names: Collection[str]) -> str:
    """SHA-256 of all settings of these runs that differ from their defaults.

    A new option changes nothing, nor does a new run.
    """
    runs = {name: _chosen(run) for name, run in study.runs.items() if name in names}
    text = json.dumps([study.metric, list(study.lengths), runs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _chosen(value: Any) -> Any:
    """The class of a config and its values that are not the class's defaults, and so for configs within."""
    if isinstance(value, tuple):
        return [_chosen(element) for element in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
    return {
        "type": type(value).__name__,
        **{name: _chosen(chosen) for name, (chosen, default) in fields.items() if chosen != default},
    }


def shortened(runs: Mapping[str, Experiment], most: int = 3, steps: int = 20) -> dict[str, Experiment]:
    """One run of each of the first groups, with so few steps that only the machinery is tested."""
    first = {without_seed(name): name for name in reversed(runs)}
    chosen = [name for name in runs if name in first.values()][:most]
    return {
        name: dataclasses.replace(
            runs[name],
            data=dataclasses.replace(runs[name].data, test_rows=32),
            training=TrainingConfig(steps=steps, eval_every=steps, checkpoint_every=steps),
        )
        for name in chosen
    }
