"""The page and the figure of a study: what its runs reached, what is finished, which orderings hold."""

import json
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import protocol
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from hyena_jax.config import TASK_CONFIGS
from hyena_jax.sweeps.compare import KIB, GroupSummary, markdown
from hyena_jax.sweeps.figure import COLOURS, fill_range, save_figure
from hyena_jax.sweeps.runs import without_seed

if TYPE_CHECKING:
    from study import Study

MARKERS = "os^Dv<P*"
BACKGROUND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
N_SEEDS = 3  # of each group of an ordering
TIE = 0.02
"""Published values that are no further apart count as equal in a rank correlation."""


@dataclass(frozen=True)
class Group(GroupSummary):
    """What the runs of a group reached, also at other lengths, and whether its training is finished."""

    by_length: Mapping[int, tuple[float, ...]]
    solved: float
    """A value of at least this solves the task."""
    rows: int
    """The most rows that one of its runs was trained on."""
    gain: float | None
    """What twice the rows added to the value of one run; None if they were not tried."""
    later: float | None
    """The value of that run after twice the rows."""
    learning_rate: float | None
    """The best of those searched; None if none was searched."""
    budget: int
    """The rows that each of its runs may be trained on."""

    def at(self, length: int | None) -> tuple[float, ...]:
        """The values at a test length, or those of the evaluation during training."""
        return self.last if length is None else self.by_length[length]

    def median(self, length: int | None = None) -> float:
        """The median of these over seeds."""
        return statistics.median(self.at(length))

    @property
    def is_solved(self) -> bool:
        """Whether the median run has solved the task."""
        return self.median() >= self.solved

    @property
    def is_solved_later(self) -> bool:
        """Whether the run of twice the rows has solved the task."""
        return self.later is not None and self.later >= self.solved

    @property
    def is_finished(self) -> bool:
        """Whether more training would not change the value: see `protocol`."""
        has_ended = self.gain is not None and self.gain < protocol.ENOUGH and not self.is_solved_later
        return self.is_solved or has_ended

    @property
    def status(self) -> str:
        """How training ended, in words."""
        if self.is_solved:
            return "solved"
        if self.is_finished:
            worse = f" ({self.gain:+.3f} from twice the rows)" if self.gain <= -protocol.ENOUGH else ""
            return f"not within {self.rows:,} rows{worse}"
        if self.is_solved_later:
            return "unfinished: a schedule twice as long solves it"
        if self.later is None:
            return "unfinished"
        return f"unfinished: twice the rows take a seed from {self.later - self.gain:.3f} to {self.later:.3f}"


def groups_of(study: "Study", results: Mapping[str, Any]) -> dict[str, Group]:
    """The groups of the runs in results.json, by name."""
    members: dict[str, list[dict]] = {}
    for name, row in results["runs"].items():
        members.setdefault(without_seed(name), []).append(row)
    longer, found = results.get("longer", {}), {}
    budgets = {
        without_seed(name): protocol.n_rows(run, run.training.steps) for name, run in study.runs.items()
    }
    for name, rows in members.items():
        more = longer.get(name, {})
        found[name] = Group(
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
            solved=study.solved,
            rows=max(more.get("rows", 0), *(row.get("rows", 0) for row in rows)),
            gain=more.get("gain"),
            later=more.get("value"),
            learning_rate=rows[0].get("learning_rate"),
            budget=budgets[name],
        )
    return found


def rank_correlation(study: "Study", groups: Mapping[str, Group]) -> tuple[float, int] | None:
    """Spearman's correlation of published values and our medians at finished groups, and their number.

    Published values within `TIE` of one another are ties, as are ours from `solved` on, where runs stop;
    settings that all of ours solve are left out.
    None with fewer than three values on either side, which say nothing of an order.
    """
    settings: dict[str, list[str]] = {}
    for name in groups:
        kept = [
            part for part in name.split(",") if part.partition("=")[0] not in ("pattern", "model", "filter")
        ]
        settings.setdefault(",".join(kept), []).append(name)
    telling = [
        name for names in settings.values() for name in names if not all(groups[n].is_solved for n in names)
    ]
    names = [name for name in telling if name in study.published and groups[name].is_finished]
    ours = [min(groups[name].median(), study.solved) for name in names]
    theirs = tied([study.published[name] for name in names])
    if len({*ours}) < 3 or len({*theirs}) < 3:
        return None
    return float(spearmanr(ours, theirs).statistic), len(names)


def tied(values: Sequence[float]) -> list[float]:
    """The values, where those that follow one another within TIE are replaced by the least of them."""
    order, lowest = sorted(values), {}
    for i, value in enumerate(order):
        lowest[value] = lowest[order[i - 1]] if i and value - order[i - 1] <= TIE else value
    return [lowest[value] for value in values]


class Ordering(NamedTuple):
    """An expected ordering, and how it came out."""

    text: str
    how: str
    """`holds`, `holds, also at 2N` or `not shown`."""
    why: str
    low: float
    """The lowest seed of the side that should be above."""
    high: float
    """The highest seed of the other."""


def orderings(study: "Study", groups: Mapping[str, Group]) -> list[Ordering]:
    """Each expected ordering of which there are results.

    It holds if all groups have N_SEEDS seeds, the first side has no larger a budget, and its lowest seed is
    above the highest of the second side; and at 2N if it is above the doubled runs of that side as well.
    """
    found, length = [], study.above_at
    for sides in study.above:
        higher, lower = ([groups[name] for name in side if name in groups] for side in sides)
        if not higher or not lower:
            continue
        most = study.solved if length is None else 1.0  # beyond solving its task no group is above another
        worst = min(higher, key=lambda group: min(group.at(length)))
        rival = max(lower, key=lambda group: max(group.at(length)))
        low, high = min(worst.at(length)), max(rival.at(length))
        how, few = "not shown", [label(g.label) for g in (*higher, *lower) if g.n_runs < N_SEEDS]
        budget, least = max(group.budget for group in higher), min(group.budget for group in lower)
        values = f"{low:.3f} ({label(worst.label)}) against {high:.3f} ({label(rival.label)})"
        if few:
            why = f"fewer than {N_SEEDS} seeds: {'; '.join(few) if len(few) < 3 else f'{len(few)} groups'}"
        elif all(group.is_solved for group in (*higher, *lower)) and length is None:
            why = "every model solves the task"
        elif min(low, most) <= min(high, most):
            why = f"the lowest seed is not above the highest: {values}"
        elif budget > least:
            why = f"unequal budgets: {budget:,} rows against {least:,}"
        else:
            how, why = "holds", f"lowest against highest seed: {values}"
            if length is None and all(g.later is not None and g.later < low for g in lower):
                how = "holds, also at 2N"
        names = (
            ("each of " if len(side) > 1 else "") + "; ".join(label(group.label) for group in side)
            for side in (higher, lower)
        )
        at = f", at {budget:,} rows" + ("" if length is None else f" and {length} {study.unit}")
        found.append(Ordering(f"{' above '.join(names)}{at}", how, why, low, high))
    return found


def verdict(study: "Study", groups: Mapping[str, Group]) -> str:
    """How many of the expected orderings hold, in words."""
    found = [one.how for one in orderings(study, groups)]
    if not found:
        return "none stated"
    also, n_held = found.count("holds, also at 2N"), len(found) - found.count("not shown")
    return f"{n_held} of {len(found)} hold" + (f", {also} also at 2N" if also else "")


def page(study: "Study", results: Mapping[str, Any]) -> str:
    """The page of an experiment, in Markdown."""
    groups = groups_of(study, results)
    task_names = {data: f"`tasks:{name}`" for name, data in TASK_CONFIGS.items()}
    tasks = dict.fromkeys(task_names[type(run.data)] for run in study.runs.values())
    lines = [
        f"# {study.title}\n",
        f"{study.source}. {study.claim.strip()}\n",
        f"```bash\n{results['command']}\n```\n",
        f"{_made(results)}. That command writes this page.\n",
        *(
            f"Added or replaced later, by `{later['command']}` ({_made(later)}): "
            f"{'; '.join(map(label, later['groups']))}.\n"
            for later in results.get("later", [])
        ),
        f"Trained on {', '.join(tasks)}. Median, range and solved runs: over seeds, on {study.evaluated}. "
        "`step` is the last step, and `state` the decoding state of one sequence.\n",
        how_trained(study, results),
        "",
        *_table(study, groups),
        "",
    ]
    marks = {"not shown": "**not shown**"}
    lines += [f"- {marks.get(one.how, one.how)}: {one.text} ({one.why})" for one in orderings(study, groups)]
    correlation = rank_correlation(study, groups)
    if correlation is not None:
        value, n = correlation
        lines.append(
            f"- Spearman's rank correlation with {n} published values of finished groups, all settings"
            f" together: {value:.2f}"
        )
    missing = {without_seed(name) for name in study.runs if name not in results["runs"]}
    if missing:
        names = [label(group) for group in dict.fromkeys(map(without_seed, study.runs)) if group in missing]
        lines += ["", f"Not run yet, or not with all seeds: {'; '.join(names)}."]
    lines += ["", "![results](plot.png)", "", study.findings.strip(), ""]
    return "\n".join([*lines, *_at_paper_scale(study)])


def _at_paper_scale(study: "Study") -> list[str]:
    """What trains the study at the setting of its source, and whether that was done."""
    if not study.paper:
        return []
    kept = study.folder / "paper" / "results.json"
    done = "Not run yet: it takes an accelerator."
    if kept.exists():
        done = f"[Results](paper/README.md): {_made(json.loads(kept.read_text()))}."
    command = " ".join([*study.command, "--scale", "paper"])
    return [
        "## At the setting of the source\n",
        f"{study.paper['claim'].strip()}\n",
        "The protocol is the same: rates are searched from the source's on, and runs stop early where those"
        " of the small size do. Clipping of gradients at 1, and a warm-up and a final rate that the source"
        " does not give, are those of the small size as well.\n",
        f"```bash\n{command}\n```\n",
        f"{done}\n",
    ]


def how_trained(study: "Study", results: Mapping[str, Any]) -> str:
    """The protocol and the budget of the results, as a paragraph."""
    least, most = protocol.budget_in_rows(list(study.runs.values()))
    rows = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    paper = f"the source trains on {study.paper_rows}"
    if not study.paper_rows:
        paper = "how many the source takes we do not know"
    budget = f"At most {rows} rows a run; {paper}."
    longer = results.get("longer", {}).values()
    of_first = [row for row in longer if "run" not in row]  # as in earlier versions of the protocol
    which = "median" if not of_first else "first" if len(of_first) == len(longer) else "median or first"
    finished = (
        "A group, all seeds of one setting, is finished once its median has solved the task, or once its"
        f" {which} seed, trained over twice the steps, gains less than {protocol.ENOUGH} and does not solve"
        " it; another seed or rate might gain more. All others are unfinished, and drawn hollow."
    )
    if study.lengths:
        finished += (
            " This is judged on the rows named above; what more training does at other lengths was not tried."
        )
    searched = (
        "the best of at least three, half a decade apart, found at a quarter of the steps with its own"
        f" seed and rows{_chosen_by(study, results.get('search', {}))}"
    )
    for name in map(without_seed, results["runs"]):
        if study.searched_at(name) != name:  # the first of them is example enough
            searched += (
                f"; some groups share one, as {label(name)} has that of {label(study.searched_at(name))}"
            )
            break
    n_searched = sum("learning_rate" in row for row in results["runs"].values())
    if n_searched == 0:
        return f"{budget} One learning rate, not searched, and no longer runs. {finished}"
    if n_searched < len(results["runs"]):
        return (
            f"{budget} A learning rate in the table is {searched}; groups without one were trained at one"
            f" rate, not searched, and no longer. {finished}"
        )
    return f"{budget} The learning rate is {searched}. {finished}"


def _chosen_by(study: "Study", searches: Mapping[str, Any]) -> str:
    """By what rates were chosen, in words; earlier versions of the protocol did so by the metric."""
    metric = study.metric.replace("_", " ")
    by_metric = [label(group) for group, search in searches.items() if "values" in search]
    if len(by_metric) == len(searches):
        return f", by {metric}" if searches else ""
    return ", by loss" + (f" (earlier by {metric}, for {'; '.join(by_metric)})" if by_metric else "")


def _made(results: Mapping[str, Any]) -> str:
    """How long the runs took, and on what."""
    machine, versions = results["hardware"], results["versions"]
    return (
        f"{results['seconds'] / 60:.0f} minutes on {machine['cores']} cores ({machine['device']}); "
        f"Python {versions['python']}, JAX {versions['jax']}"
    )


def _table(study: "Study", groups: Mapping[str, Group]) -> list[str]:
    lengths = sorted({length for group in groups.values() for length in group.by_length})
    columns = ["published"] if study.published else []
    columns += [
        f"median {study.metric.replace('_', ' ')}",
        "range over seeds",
        f"solved ({study.solved:g})",
        "training",
        *(f"at {length:,} {study.unit}" for length in lengths),
    ]
    is_searched = any(group.learning_rate is not None for group in groups.values())
    columns += ["rate"] if is_searched else []
    columns += ["step", "seconds", "parameters", "state, KiB"]
    rows = []
    for name, group in groups.items():
        published = study.published.get(name)
        cells = [] if not study.published else ["" if published is None else f"{published:.3f}"]
        n_solved = sum(value >= study.solved for value in group.last)
        spread = f"{min(group.last):.3f} to {max(group.last):.3f}" if group.n_runs > 1 else "one seed"
        cells += [f"**{group.median():.3f}**", spread, f"{n_solved} of {group.n_runs}", group.status]
        cells += [f"{group.median(length):.3f}" for length in lengths]
        cells += ["" if group.learning_rate is None else f"{group.learning_rate:g}"] if is_searched else []
        cells += [cost.strip("-") for cost in group.costs.values()]  # empty for a model without a state
        rows.append((label(name), cells))
    return markdown("model", columns, rows)


def label(name: str) -> str:
    """A group's name for people: its values, with the names of those that are numbers."""
    parts = [part.partition("=") for part in name.split(",")]
    return ", ".join(value if not re.match(r"[\d.]", value) else f"{key} {value}" for key, _, value in parts)


def draw(study: "Study", groups: Mapping[str, Group], path: Path) -> None:
    """Draws the groups: lines over `study.x`, or bars; published values are dashed, or diamonds.

    Groups that are unfinished are hollow. Lines of several tasks have a panel each.
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
    save_figure(figure, path, dpi=130)


def _draw_bars(study: "Study", groups: Mapping[str, Group], axes: Axes) -> None:
    for i, group in enumerate(groups.values()):
        axes.barh(
            i, group.median(), color=COLOURS[0], alpha=0.55, fill=group.is_finished, edgecolor=COLOURS[0]
        )
        axes.plot(group.last, [i] * group.n_runs, "o", color=COLOURS[0], markersize=4)
        if group.label in study.published:
            axes.plot(study.published[group.label], i, "D", color=COLOURS[1], fillstyle="none", markersize=8)
    axes.set_yticks(range(len(groups)), [label(name) for name in groups])
    axes.set_ylim(len(groups) - 0.4, -0.6)
    shown = "bar: median, dots: seeds" + (", diamond: published" if study.published else "")
    shown += "" if all(group.is_finished for group in groups.values()) else ", hollow: unfinished"
    axes.set_xlabel(f"{study.metric.replace('_', ' ')}\n({shown})")


@dataclass(frozen=True)
class Point:
    """A point of a line: the values of all seeds, whether it is finished, and what was published."""

    x: float
    values: tuple[float, ...]
    is_finished: bool
    published: float | None = None


def _draw_lines(study: "Study", groups: Mapping[str, Group], figure: Figure) -> None:
    panels: dict[str, dict[str, list[Point]]] = {}
    for name, group in groups.items():
        settings = dict(part.split("=", 1) for part in name.split(","))
        lines = panels.setdefault(settings.pop("task", ""), {})
        published = study.published.get(name)
        if study.x == "length":
            points = [Point(length, values, group.is_finished) for length, values in group.by_length.items()]
        elif study.x == "state":
            points = [Point((group.state_bytes or 0) / KIB, group.last, group.is_finished, published)]
            settings = {"pattern": settings["pattern"]}
        else:
            points = [Point(float(settings.pop(study.x)), group.last, group.is_finished, published)]
        lines.setdefault(", ".join(settings.values()), []).extend(points)
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    styles = _styles_of(panels.values())
    for axes, (task, lines) in zip(all_axes, panels.items(), strict=True):
        _draw_panel(axes, lines, styles)
        axes.set_title(task, fontsize="medium")
        if study.x in ("state", "length"):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if study.x != "state":
            axes.set_xticks(sorted({point.x for points in lines.values() for point in points}))
        words = {"state": "decoding state of a sequence, KiB", "length": f"test length, {study.unit}"}
        axes.set_xlabel(words.get(study.x, study.x.replace("_", " ")))
    notes = ["dashed: published"] if study.published else []
    notes += [] if all(group.is_finished for group in groups.values()) else ["hollow: unfinished"]
    shown = f"   ({', '.join(notes)})" if notes else ""
    all_axes[0].set_ylabel(study.metric.replace("_", " ") + shown)
    handles = {}
    for axes in all_axes:
        found, labels = axes.get_legend_handles_labels()
        handles = {**dict(zip(labels, found, strict=True)), **handles}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)


def _styles_of(panels: Collection[Mapping[str, Sequence[Point]]]) -> dict[str, dict[str, str]]:
    """Colour, marker and stroke of each name that is a line of several points in one of the panels."""
    styles = (  # after the last colour they begin again, with other markers and dots between dashes
        {"color": colour, "marker": marker, "linestyle": "-." if shift else "-"}
        for shift in range(len(MARKERS))
        for colour, marker in zip(COLOURS, MARKERS[shift:] + MARKERS[:shift], strict=True)
    )
    names = dict.fromkeys(name for lines in panels for name, points in lines.items() if len(points) > 1)
    return dict(zip(names, styles, strict=False))


def _draw_panel(
    axes: Axes, lines: Mapping[str, Sequence[Point]], styles: Mapping[str, Mapping[str, str]]
) -> None:
    """Medians as lines and ranges over seeds as bands; a line with single seeds has error bars instead."""
    for name, points in lines.items():
        points = sorted(points, key=lambda point: point.x)
        x, medians = [point.x for point in points], [statistics.median(point.values) for point in points]
        if name not in styles:  # a point, named where it lies, so that the colours are enough for the lines
            face = "#303030" if points[0].is_finished else "white"
            axes.plot(x, medians, "o", color="#303030", markerfacecolor=face, markersize=4)
            at = (x[0], medians[0])
            axes.annotate(
                name, at, (0, 5), textcoords="offset points", ha="center", fontsize=8, bbox=BACKGROUND
            )
            continue
        style, colour = styles[name], styles[name]["color"]
        axes.plot(x, medians, **style, label=name, markersize=5)
        hollow = [(point.x, statistics.median(point.values)) for point in points if not point.is_finished]
        if hollow:
            shape = {**style, "linestyle": "", "markerfacecolor": "white", "markersize": 5}
            axes.plot(*zip(*hollow, strict=True), **shape)
        if all(len(point.values) > 1 for point in points):
            fill_range(axes, {point.x: point.values for point in points}, color=colour, alpha=0.15)
        else:
            low, high = ([of(point.values) for point in points] for of in (min, max))
            axes.vlines(x, low, high, color=colour, linewidth=3, alpha=0.4)
        known = [(point.x, point.published) for point in points if point.published is not None]
        if known:
            axes.plot(*zip(*known, strict=True), "--", color=colour)
