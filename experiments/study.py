"""What the experiments on tasks share: runs, their results beside published ones, a figure and a page.

Each is a folder with a `run.py` that describes a `Study` and calls `main`:

    python experiments/NAME/run.py [--jobs 2] [--quick]

The runs are a sweep: started again, it continues. Results go to results.json, plot.png and README.md in the
folder of the experiment; with `--quick`, a check of a minute, to a folder of runs.
"""

import dataclasses
import hashlib
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr

import hyena_jax
from hyena_jax import config
from hyena_jax.benchmark.machine import describe_machine, describe_versions
from hyena_jax.comparison.figure import COLOURS, fill_range, save
from hyena_jax.comparison.runs import without_seed
from hyena_jax.comparison.table import KIB, GroupSummary, markdown, n_params, state_size
from hyena_jax.config import TASK_CONFIGS, Experiment, TaskConfig, TrainingConfig, UserError
from hyena_jax.files import write_text
from hyena_jax.output import bar
from hyena_jax.signals import Interrupted

FAULTS = (UserError, OSError, Interrupted, KeyboardInterrupt, json.JSONDecodeError)
"""What a person can cause: reported in a line, by `describe`."""
MARKERS = "os^Dv<P*"
BACKGROUND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}


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
    claim: str
    """What the source says, and what is measured here instead, in Markdown."""
    runs: Mapping[str, Experiment]
    metric: str
    solved: float
    """A run with at least this value has solved its task."""
    published: Mapping[str, float] = field(default_factory=dict)
    """Published values by group, as fractions; groups that were not published are missing."""
    above: Sequence[tuple[Sequence[str], Sequence[str]]] = ()
    """Expected orderings: each of the first groups has a higher median than each of the second."""
    above_at: int | None = None
    """The test length at which they are expected; None takes the evaluation during training."""
    lengths: Mapping[int, Callable[[TaskConfig], TaskConfig]] = field(default_factory=dict)
    """Further lengths to evaluate at: how the data change."""
    unit: str = "tokens"
    """What the test lengths count."""
    evaluated: str = "rows of the training length"
    """The rows of the evaluation during training, from which median, range and solved runs are taken."""
    x: str | None = None
    """The setting on the horizontal axis, or `state` or `length`; None draws a bar for each group."""
    findings: str = ""
    """What came out, in Markdown: the reasons, not the numbers of the table."""


@dataclass(frozen=True)
class Group(GroupSummary):
    """What the runs of a group reached, also at other lengths."""

    by_length: Mapping[int, tuple[float, ...]]

    def at(self, length: int | None) -> tuple[float, ...]:
        """The values at a test length, or those of the evaluation during training."""
        return self.last if length is None else self.by_length[length]

    def median(self, length: int | None = None) -> float:
        """The median of these over seeds."""
        return statistics.median(self.at(length))


def main(study: Study) -> None:
    """The command line of an experiment."""

    def command(
        workdir: Path = Path("runs") / study.folder.name,
        jobs: int = 1,
        quick: bool = False,
        plot_only: bool = False,
    ) -> None:
        """Trains what is missing, and writes results.json, plot.png and README.md.

        Args:
          workdir: folder of the runs.
          jobs: runs that are trained at the same time.
          quick: a few steps of the first runs, whose results stay in WORKDIR_quick.
          plot_only: draw and write from results.json, and train nothing.
        """
        folder = Path(f"{workdir}_quick") if quick else workdir
        try:
            if not plot_only:
                run(study, folder, jobs, quick)
            if not quick:
                write(study, study.folder, json.loads((study.folder / "results.json").read_text()))
        except FAULTS as error:
            sys.exit(describe(error))

    tyro.cli(command, description=study.claim)


def describe(error: BaseException) -> str:
    """One of FAULTS as a line."""
    if isinstance(error, json.JSONDecodeError):
        return f"error: results.json is damaged: {error}"
    return f"error: {str(error) or 'interrupted'}"


def task_runs(
    group: str, task: str, pattern: str, seeds: Sequence[int], flags: Sequence[str] = ()
) -> dict[str, Experiment]:
    """A group of runs of `tasks:TASK` with other mixers; attention alone has one head and learned positions.

    Args:
      group: the name of the group, with which the names of the runs begin.
      flags: settings of the runs; they may choose the positions.
    """
    own = ["--model.pattern.0.n-heads", "1"] if pattern == "attention" else []
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


def digest(study: Study) -> str:
    """SHA-256 of all settings that differ from their defaults, so that a new option changes nothing."""
    runs = {name: _chosen(experiment) for name, experiment in study.runs.items()}
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


def run(study: Study, workdir: Path, jobs: int, quick: bool) -> dict[str, Any]:
    """Trains and evaluates the runs; returns the results, which it also writes."""
    runs = shortened(study.runs) if quick else study.runs
    began = time.monotonic()
    outcomes = hyena_jax.sweep(runs, workdir, jobs=jobs)
    for name, outcome in outcomes.items():
        if outcome.status != "done" or outcome.values is None:
            raise UserError(f"the run {name} is not done: {outcome.error or 'it has no evaluation'}")
    rows: dict[str, dict[str, Any]] = {}
    with bar("evaluating", len(outcomes)) as advance:
        for name, outcome in outcomes.items():
            experiment = config.read_run(outcome.workdir)  # with the vocabulary filled in
            rows[name] = {
                "value": outcome.values[study.metric],
                "step": outcome.step,
                "seconds": round(outcome.seconds, 1),
                "n_params": n_params(experiment.model),
                "state_bytes": state_size(experiment.model),
                "by_length": _by_length(study, outcome.workdir),
            }
            advance()
    results = {
        "digest": digest(study),
        "command": f"python experiments/{study.folder.name}/run.py --jobs {jobs}",
        "seconds": round(sum(row["seconds"] for row in rows.values()) / jobs),
        "hardware": describe_machine(),
        "versions": describe_versions(),
        "runs": rows,
    }
    groups = groups_of(study, results)
    print(f"{len(rows)} runs, {time.monotonic() - began:.0f} s; expected orderings: {verdict(study, groups)}")
    correlation = rank_correlation(study, groups)
    if correlation is not None:
        print(f"Spearman's rank correlation with {correlation[1]} published values: {correlation[0]:.2f}")
    path = (workdir if quick else study.folder) / "results.json"
    write_text(path, json.dumps(results, indent=1) + "\n")
    if quick:
        write(study, workdir, results)
    return results


def _by_length(study: Study, workdir: Path) -> dict[str, float]:
    if not study.lengths:
        return {}
    trained = hyena_jax.load_run(workdir, quiet=True)
    data = trained.experiment.data
    return {
        str(length): trained.evaluate(data=change(data))[study.metric]
        for length, change in study.lengths.items()
    }


def groups_of(study: Study, results: Mapping[str, Any]) -> dict[str, Group]:
    """The groups of the runs in results.json, by name."""
    members: dict[str, list[dict]] = {}
    for name, row in results["runs"].items():
        members.setdefault(without_seed(name), []).append(row)
    return {
        name: Group(
            label=name,
            metric=study.metric,
            last=tuple(row["value"] for row in rows),
            best=max(row["value"] for row in rows),
            steps=tuple(row["step"] for row in rows),
            seconds=statistics.median(row["seconds"] for row in rows),
            n_params=rows[0]["n_params"],
            state_bytes=rows[0]["state_bytes"],
            by_length={
                int(length): tuple(row["by_length"][length] for row in rows)
                for length in rows[0]["by_length"]
            },
        )
        for name, rows in members.items()
    }


def rank_correlation(study: Study, groups: Mapping[str, Group]) -> tuple[float, int] | None:
    """Spearman's correlation of published values and our medians, and their number.

    None with fewer than three, or where one side has a single value.
    """
    names = [name for name in groups if name in study.published]
    if len(names) < 3:
        return None
    ours, theirs = [groups[name].median() for name in names], [study.published[name] for name in names]
    if len({*ours}) == 1 or len({*theirs}) == 1:
        return None
    return float(spearmanr(ours, theirs).statistic), len(names)


def orderings(study: Study, groups: Mapping[str, Group]) -> list[tuple[str, bool]]:
    """Each expected ordering in words, and whether it holds between the medians."""
    found = []
    for higher, lower in study.above:
        pairs = [(groups[a], groups[b]) for a in higher for b in lower if a in groups and b in groups]
        if pairs:
            length = study.above_at
            holds = all(a.median(length) > b.median(length) for a, b in pairs)
            overlap = holds and any(min(a.at(length)) <= max(b.at(length)) for a, b in pairs)
            names = ("; ".join(label(name) for name in side) for side in (higher, lower))
            where = "" if length is None else f", at {length} {study.unit}"
            note = " (between medians; the ranges over seeds overlap)" if overlap else ""
            found.append((" above ".join(names) + where + note, holds))
    return found


def verdict(study: Study, groups: Mapping[str, Group]) -> str:
    """How many of the expected orderings hold, in words."""
    found = orderings(study, groups)
    if not found:
        return "none stated"
    held = sum(holds for _, holds in found)
    return f"{held} of {len(found)} hold"


def write(study: Study, folder: Path, results: Mapping[str, Any]) -> None:
    """Writes the figure and the page."""
    groups = groups_of(study, results)
    draw(study, groups, folder / "plot.png")
    write_text(folder / "README.md", page(study, results))


def page(study: Study, results: Mapping[str, Any]) -> str:
    """The page of an experiment, in Markdown."""
    groups = groups_of(study, results)
    machine, versions = results["hardware"], results["versions"]
    minutes = results["seconds"] / 60
    task_names = {data: f"`tasks:{name}`" for name, data in TASK_CONFIGS.items()}
    tasks = dict.fromkeys(task_names[type(run.data)] for run in study.runs.values())
    lines = [
        f"# {study.title}\n",
        f"{study.source}. {study.claim.strip()}\n",
        f"```bash\n{results['command']}\n```\n",
        f"{minutes:.0f} minutes on {machine['cores']} cores ({machine['device']}); "
        f"Python {versions['python']}, JAX {versions['jax']}. That command writes this page.\n",
        f"Trained on {', '.join(tasks)}. Median, range and solved runs: over seeds, on {study.evaluated}. "
        "`step` is the last step, and `state` the decoding state of one sequence.\n",
        *_table(study, groups),
        "",
    ]
    lines += [
        f"- {'holds' if holds else '**does not hold**'}: {text}" for text, holds in orderings(study, groups)
    ]
    correlation = rank_correlation(study, groups)
    if correlation is not None:
        value, n = correlation
        lines.append(f"- Spearman's rank correlation with the {n} published values: {value:.2f}")
    lines += ["", "![results](plot.png)", "", study.findings.strip(), ""]
    return "\n".join(lines)


def _table(study: Study, groups: Mapping[str, Group]) -> list[str]:
    lengths = sorted({length for group in groups.values() for length in group.by_length})
    columns = ["published"] if study.published else []
    columns += [
        f"median {study.metric.replace('_', ' ')}",
        "range over seeds",
        f"solved ({study.solved:g})",
        *(f"at {length:,} {study.unit}" for length in lengths),
    ]
    columns += ["step", "seconds", "parameters", "state, KiB"]
    rows = []
    for name, group in groups.items():
        published = study.published.get(name)
        cells = [] if not study.published else ["" if published is None else f"{published:.3f}"]
        n_solved = sum(value >= study.solved for value in group.last)
        spread = f"{min(group.last):.3f} to {max(group.last):.3f}" if group.n_runs > 1 else "one seed"
        cells += [f"**{group.median():.3f}**", spread, f"{n_solved} of {group.n_runs}"]
        cells += [f"{group.median(length):.3f}" for length in lengths]
        cells += [cost.strip("-") for cost in group.costs.values()]  # empty for a model without a state
        rows.append((label(name), cells))
    return markdown("model", columns, rows)


def label(name: str) -> str:
    """A group's name for people: its values, with the names of those that are numbers."""
    parts = [part.partition("=") for part in name.split(",")]
    return ", ".join(value if not re.match(r"[\d.]", value) else f"{key} {value}" for key, _, value in parts)


def draw(study: Study, groups: Mapping[str, Group], path: Path) -> None:
    """Draws the groups: lines over `study.x`, or bars; published values are dashed, or hollow.

    Lines of several tasks have a panel each.
    """
    if study.x is None:
        height = max(4.6, 1 + 0.22 * len(groups))  # so that the names of bars do not touch
        figure = Figure(figsize=(8, height), layout="constrained")
        _draw_bars(study, groups, figure.subplots())
    else:
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        _draw_lines(study, groups, figure)
    figure.suptitle(study.title, fontsize="medium")
    for axes in figure.axes:
        axes.grid(alpha=0.25)
    save(figure, path, dpi=130)


def _draw_bars(study: Study, groups: Mapping[str, Group], axes: Axes) -> None:
    for i, group in enumerate(groups.values()):
        axes.barh(i, group.median(), color=COLOURS[0], alpha=0.55)
        axes.plot(group.last, [i] * group.n_runs, "o", color=COLOURS[0], markersize=4)
        if group.label in study.published:
            axes.plot(study.published[group.label], i, "D", color=COLOURS[1], fillstyle="none", markersize=8)
    axes.set_yticks(range(len(groups)), [label(name) for name in groups])
    axes.set_ylim(len(groups) - 0.4, -0.6)
    shown = "bar: median, dots: seeds" + (", diamond: published" if study.published else "")
    axes.set_xlabel(f"{study.metric.replace('_', ' ')}   ({shown})")


@dataclass(frozen=True)
class Point:
    """A point of a line: the values of all seeds, and what was published."""

    x: float
    values: tuple[float, ...]
    published: float | None = None


def _draw_lines(study: Study, groups: Mapping[str, Group], figure: Figure) -> None:
    panels: dict[str, dict[str, list[Point]]] = {}
    for name, group in groups.items():
        settings = dict(part.split("=", 1) for part in name.split(","))
        lines = panels.setdefault(settings.pop("task", ""), {})
        published = study.published.get(name)
        if study.x == "length":
            points = [Point(length, values) for length, values in group.by_length.items()]
        elif study.x == "state":
            points = [Point((group.state_bytes or 0) / KIB, group.last, published)]
            settings = {"pattern": settings["pattern"]}
        else:
            points = [Point(float(settings.pop(study.x)), group.last, published)]
        lines.setdefault(", ".join(settings.values()), []).extend(points)
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (task, lines) in zip(all_axes, panels.items(), strict=True):
        _draw_panel(axes, lines)
        axes.set_title(task, fontsize="medium")
        if study.x in ("state", "length"):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if study.x != "state":
            axes.set_xticks(sorted({point.x for points in lines.values() for point in points}))
        words = {"state": "decoding state of a sequence, KiB", "length": f"test length, {study.unit}"}
        axes.set_xlabel(words.get(study.x, study.x.replace("_", " ")))
    notes = ["   (dashed: published)"] if study.published else []
    all_axes[0].set_ylabel("".join([study.metric.replace("_", " "), *notes]))
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)


def _draw_panel(axes: Axes, lines: Mapping[str, Sequence[Point]]) -> None:
    """Medians as lines and ranges over seeds as bands; a line with single seeds has error bars instead."""
    styles = iter(zip(COLOURS, MARKERS, strict=True))
    for name, points in lines.items():
        points = sorted(points, key=lambda point: point.x)
        x, medians = [point.x for point in points], [statistics.median(point.values) for point in points]
        if len(points) == 1:  # named where it lies, so that the colours are enough for the lines
            axes.plot(x, medians, "o", color="#303030", markersize=4)
            at = (x[0], medians[0])
            axes.annotate(
                name, at, (0, 5), textcoords="offset points", ha="center", fontsize=8, bbox=BACKGROUND
            )
            continue
        colour, marker = next(styles)
        axes.plot(x, medians, marker=marker, color=colour, label=name, markersize=5)
        if all(len(point.values) > 1 for point in points):
            fill_range(axes, {point.x: point.values for point in points}, color=colour, alpha=0.15)
        else:
            low, high = ([of(point.values) for point in points] for of in (min, max))
            axes.vlines(x, low, high, color=colour, linewidth=3, alpha=0.4)
        known = [(point.x, point.published) for point in points if point.published is not None]
        if known:
            axes.plot(*zip(*known, strict=True), "--", color=colour, marker=marker, fillstyle="none")
