"""The page and the figure of a study: the claim, a picture, a table, which orderings hold, and how."""

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import protocol
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyena_jax.config import TASK_CONFIGS
from hyena_jax.sweeps.compare import GroupSummary, markdown
from hyena_jax.sweeps.figure import COLOURS, save_figure
from hyena_jax.sweeps.runs import without_seed

if TYPE_CHECKING:
    from study import Study

N_SEEDS = 3  # of each group of an ordering
MARGIN = 0.02  # the standard error of an accuracy is up to 0.01
MAX_ROWS, MAX_COLUMNS = 10, 8
COLOUR_OF = {
    **{"hyena": 0, "hawk": 1, "attention": 2, "gated_delta": 3, "mamba2": 4, "local_attention": 5, "h3": 6},
    **{"fir": 4, "s4d": 5, "aft_conv": 3, "rwkv7": 7, "kda": 7, "mamba3": 5, "delta_product": 7, "rotary": 5},
    "hard_alibi": 2,
}
"""A mixer's colour, the same in all pictures; two share one where no picture has both."""


@dataclass(frozen=True)
class Group(GroupSummary):
    """What the runs of a group reached, also at other lengths."""

    by_length: Mapping[int, tuple[float, ...]]
    solved: float
    """A value of at least this solves the task."""
    later: float | None
    """The value of one run after twice the rows; None if they were not tried."""
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
        by_length = {
            int(length): tuple(row["by_length"][length] for row in rows) for length in rows[0]["by_length"]
        }
        values, later = tuple(row["value"] for row in rows), longer.get(name, {}).get("value")
        if study.n_scored:
            by_length, later = _beyond(by_length, study.n_scored), None
            values = by_length[study.above_at]
        found[name] = Group(
            label=name,
            metric=study.metric,
            last=values,
            best=max(values),
            steps=tuple(row["step"] for row in rows),
            seconds=statistics.median(row["seconds"] for row in rows),
            n_params=rows[0]["n_params"],
            state_bytes=rows[0]["state_bytes"],
            by_length=by_length,
            solved=study.solved,
            later=later,
            budget=budgets[name],
        )
    return found


def _beyond(
    by_length: Mapping[int, tuple[float, ...]], n_scored: Callable[[int], int]
) -> dict[int, tuple[float, ...]]:
    """The means of the positions that a row of a length has beyond the length before it, at most 1."""
    found = {}
    for before, length in itertools.pairwise(sorted(by_length)):
        n, n_before = n_scored(length), n_scored(before)
        pairs = zip(by_length[length], by_length[before], strict=True)
        found[length] = tuple(
            min(1.0, (n * mean - n_before * first) / (n - n_before)) for mean, first in pairs
        )
    return found


class Ordering(NamedTuple):
    """An expected ordering, and how it came out."""

    text: str
    how: str
    """`holds`, `holds, also at 2N` or `not shown`."""
    why: str
    here: str
    """The lowest seed of the side that should be above against the highest of the other."""
    medians: str
    """The lowest median of that side against the highest of the other; empty where steps are compared."""


def orderings(study: "Study", groups: Mapping[str, Group]) -> list[Ordering]:
    """Each expected ordering of which there are results.

    It holds if all groups have N_SEEDS seeds, the first side has no larger a budget, and its lowest seed is
    MARGIN above the highest of the second side; and at 2N if it is above the doubled runs of that side as
    well. Where all solve the task, the steps that this took are compared instead.
    """
    found, length = [], study.above_at
    for sides in study.above:
        higher, lower = ([groups[name] for name in side if name in groups] for side in sides)
        if not higher or not lower:
            continue
        worst = min(higher, key=lambda group: min(group.at(length)))
        rival = max(lower, key=lambda group: max(group.at(length)))
        low, high = min(worst.at(length)), max(rival.at(length))
        how, few = "not shown", [label(g.label) for g in (*higher, *lower) if g.n_runs < N_SEEDS]
        budget, least = max(group.budget for group in higher), min(group.budget for group in lower)
        values = f"worst seed {low:.3f} of {label(worst.label)}, best seed {high:.3f} of {label(rival.label)}"
        digits = 2 if round(low, 2) != round(high, 2) else 3
        here, all_solve = (
            f"{low:.{digits}f} against {high:.{digits}f}",
            all(g.is_solved for g in (*higher, *lower)),
        )
        lowest, highest = min(g.median(length) for g in higher), max(g.median(length) for g in lower)
        medians = f"{lowest:.2f} against {highest:.2f}"
        late, soon = max(max(g.steps) for g in higher), min(min(g.steps) for g in lower)
        if few:
            why = f"fewer than {N_SEEDS} seeds: {'; '.join(few) if len(few) < 3 else f'{len(few)} groups'}"
        elif all_solve and length is None:
            how = "holds" if late < soon else how
            here, medians = f"by step {late:,} against {soon:,}", ""
            why = f"every model solves the task, the first side by step {late:,}, the other from {soon:,} on"
        elif low < high + MARGIN:
            why = f"{'the seeds overlap' if low <= high else f'less than {MARGIN} apart'}: {values}"
        elif budget > least:
            why = f"unequal budgets: {budget:,} rows against {least:,}"
        else:
            how, why = "holds", values
            if length is None and all(g.later is not None and g.later < low for g in lower):
                how = "holds, also at 2N"
        names = (
            ("each of " if len(side) > 1 else "") + "; ".join(label(group.label) for group in side)
            for side in (higher, lower)
        )
        at = f", in at most {budget:,} rows" + ("" if length is None else f", {length_text(study, length)}")
        found.append(Ordering(f"{' above '.join(names)}{at}", how, why, here, medians))
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
    lines = [f"# {study.title}\n", f"**{study.message}.** {study.findings.strip()}\n"]
    lines += [f"![{study.message}](plot.png)\n", *_table(study, groups), ""]
    marks = {"not shown": "**not shown**"}
    lines += [f"- {marks.get(one.how, one.how)}: {one.text} ({one.why})" for one in orderings(study, groups)]
    least, most = protocol.budget_in_rows(list(study.runs.values()))
    rows = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    paper = f"; the source takes {study.paper_rows}" if study.paper_rows else ""
    diamonds = f"; diamonds: {study.published_at}" if study.published and study.x != "task" else ""
    lines += [
        "\n## How it was made\n",
        f"{study.source}. {study.claim.strip()}\n",
        f"Trained on {', '.join(tasks)}, at most {rows} rows a run{paper}. Values: medians over seeds, on"
        f" {study.evaluated}; small dots: each seed{diamonds}."
        " All runs and rates are in results.json, the protocol in the"
        f" [summary]({'../' * (1 + (study.folder.name == 'paper'))}README.md).\n",
        f"```bash\n{' '.join(study.command)}\n```\n",
        f"{_made(results)}.{_exceptions(study, results)}\n",
    ]
    if study.limits:
        lines += ["## What it does not show\n", f"{study.limits.strip()}\n"]
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
        f"```bash\n{command}\n```\n",
        f"{done}\n",
    ]


def _made(results: Mapping[str, Any]) -> str:
    """How long all runs took, and on what."""
    machine, versions = results["hardware"], results["versions"]
    return (
        f"{seconds(results) / 60:.0f} minutes on {machine['cores']} cores ({machine['device']}); "
        f"Python {versions['python']}, JAX {versions['jax']}"
    )


def seconds(results: Mapping[str, Any]) -> float:
    """What all commands took that made these results."""
    return sum(made["seconds"] for made in (results, *results.get("later", [])))


def _exceptions(study: "Study", results: Mapping[str, Any]) -> str:
    """Where the runs are not as the protocol has them, in sentences."""
    by_accuracy = sum("values" in search for search in results.get("search", {}).values())
    missing = dict.fromkeys(without_seed(name) for name in study.runs if name not in results["runs"])
    n_searched = len(results.get("search", {}))
    which = "All" if by_accuracy == n_searched else f"{by_accuracy} of the {n_searched}"
    text = f" {which} rates were chosen by accuracy, not by loss." if by_accuracy else ""
    names = "; ".join(map(label, missing))
    return text + (f" Not run yet, or not with all seeds: {names}." if names else "")


def _table(study: "Study", groups: Mapping[str, Group]) -> list[str]:
    """The groups that the page shows, at most MAX_ROWS, in at most MAX_COLUMNS columns."""
    if study.x == "task":
        models, tasks, values = by_task(groups)
        cells = [["" if math.isnan(value) else f"{value:.2f}" for value in row] for row in values]
        return markdown("model", [task.replace("_", " ") for task in tasks], zip(models, cells, strict=True))
    shown = [name for name in study.shown or [*groups][:MAX_ROWS] if name in groups]
    columns = ["published"] if study.published else []
    columns += [f"median {study.metric.replace('_', ' ')}", "range over seeds"]
    lengths = sorted({length for name in shown for length in groups[name].by_length})
    lengths = lengths[-(MAX_COLUMNS - 3 - len(columns)) :]
    columns += [*(length_text(study, length) for length in lengths), "last step", "decoding state, KiB"]
    rows = []
    for name in shown:
        group = groups[name]
        published = study.published.get(name)
        cells = [] if not study.published else ["" if published is None else f"{published:.2f}"]
        spread = f"{min(group.last):.3f} to {max(group.last):.3f}" if group.n_runs > 1 else "one seed"
        cells += [f"{group.median():.3f}", spread]
        cells += [f"{group.median(length):.3f}" for length in lengths]
        cells += [group.costs[column].strip("-") for column in ("step", "state KiB")]
        rows.append((label(name), cells))
    return markdown("model", columns, rows)


def length_text(study: "Study", length: float) -> str:
    """A test length, or which of the scored positions its values count."""
    ends = _positions(study, length)
    return f"{study.unit} {ends}" if study.n_scored else f"at {ends} {study.unit}"


def _positions(study: "Study", length: float) -> str:
    before = max((each for each in study.lengths if each < length), default=None)
    if study.n_scored is None or before is None:
        return f"{length:,g}"
    return f"{study.n_scored(before) + 1} to {study.n_scored(int(length))}"


def by_task(groups: Mapping[str, Group]) -> tuple[list[str], list[str], list[list[float]]]:
    """Models, tasks, and the median of each model at each task, NaN where it was not run."""
    found = {
        tuple(part.partition("=")[2] for part in name.split(",")): group for name, group in groups.items()
    }
    tasks, models = (list(dict.fromkeys(name[i] for name in found)) for i in (0, 1))
    missing = math.nan
    values = [
        [found[task, model].median() if (task, model) in found else missing for task in tasks]
        for model in models
    ]
    return models, tasks, values


def label(name: str) -> str:
    """A group's name for people: its values, with the names of those that are numbers."""
    parts = [part.partition("=") for part in name.split(",")]
    return ", ".join(value if not re.match(r"[\d.]", value) else f"{key} {value}" for key, _, value in parts)


class Point(NamedTuple):
    """A point of a line: the values of all seeds."""

    x: float
    values: Sequence[float]


def draw(study: "Study", groups: Mapping[str, Group], path: Path) -> None:
    """Draws medians over `study.x` as lines, named at their ends, or as bars, or as a table of tasks.

    Small dots are seeds, diamonds published values; tasks have a panel each.
    """
    if study.x == "task":
        figure = Figure(figsize=(5.4, 4), layout="constrained")
        _draw_table(figure.subplots(), *by_task(groups))
        figure.suptitle(study.message, fontsize="medium", wrap=True)
        save_figure(figure, path, dpi=150)
        return
    panels: dict[str, dict[str, list[Point]]] = {}
    are_solved = all(group.is_solved for group in groups.values())  # then what differs is how soon
    for name, group in groups.items():
        settings = dict(part.split("=", 1) for part in name.split(","))
        lines = panels.setdefault(settings.pop("task", ""), {})
        points = [Point(length, values) for length, values in group.by_length.items()]
        if study.x != "length":
            values = group.steps if study.x is None and are_solved else group.last
            points = [Point(float(settings.pop(study.x)) if study.x else 0.0, values)]
        line = label(",".join("=".join(each) for each in settings.items()))
        if not study.drawn or line in study.drawn:
            lines.setdefault(line, []).extend(points)
    figure = Figure(figsize=(5.4, 0.6 + 3 * len(panels)), layout="constrained")
    all_axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, (task, lines) in zip(all_axes, panels.items(), strict=True):
        if study.x is None:
            lines = {name: lines[name] for name in study.drawn or lines if name in lines}
            published = {label(name): value for name, value in study.published.items()}
            _draw_bars(axes, lines, {} if are_solved else published, study.published_at)
            axes.set_xlabel("steps until solved" if are_solved else study.metric.replace("_", " "))
        else:
            _draw_lines(axes, lines, partial(_positions, study))
            axes.set_ylabel(study.metric.replace("_", " "))
            words = f"{'scored' if study.n_scored else 'test length,'} {study.unit}"
            axes.set_xlabel(words if study.x == "length" else study.x.replace("_", " "))
        if study.chance is not None:
            across = axes.axvline if study.x is None else axes.axhline
            across(study.chance, color="0.6", linestyle=":", zorder=0)
        if study.x == "length" and study.n_scored is None:
            axes.axvline(min(study.lengths), color="0.6", linestyle=":", zorder=0)
        axes.set_title(task.replace("_", " "), fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(study.message, fontsize="medium", wrap=True)
    save_figure(figure, path, dpi=150)


def style_of(name: str) -> dict[str, str]:
    """Colour and stroke of a model: the colour of its mixer, dashed for a variant of it."""
    known = sorted((mixer for mixer in COLOUR_OF if mixer in name), key=len)
    colour = COLOURS[COLOUR_OF[known[-1]]] if known else "#606060"
    return {"color": colour, "linestyle": "-" if name in COLOUR_OF else "--"}


def _draw_lines(axes: Axes, lines: Mapping[str, Sequence[Point]], text_of: Callable[[float], str]) -> None:
    ends: dict[float, dict[str, float]] = {}
    for name, points in lines.items():
        points = sorted(points)
        medians, style = [statistics.median(point.values) for point in points], style_of(name)
        axes.plot([point.x for point in points], medians, **style, marker="o", markersize=4)
        seeds = [(point.x, value) for point in points for value in point.values]
        axes.plot(*zip(*seeds, strict=True), ".", color=style["color"], alpha=0.5, markersize=5)
        ends.setdefault(points[-1].x, {})[name] = medians[-1]
    ticks = sorted({point.x for points in lines.values() for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [text_of(tick) for tick in ticks])
    axes.set_ylim(-0.02, 1.04)
    for last, names in ends.items():
        x, place = (1.02, axes.get_yaxis_transform()) if last == ticks[-1] else (1.06 * last, axes.transData)
        for name, height in _apart(names).items():
            colour = style_of(name)["color"]
            axes.text(x, height, name, color=colour, transform=place, va="center", fontsize="small")


def _apart(ends: Mapping[str, float], least: float = 0.07) -> dict[str, float]:
    """Heights of the names of lines with these ends: those that would meet stand around their mean."""

    def bottom(block: Sequence[str]) -> float:
        return max(0.0, statistics.fmean(ends[name] for name in block) - least * (len(block) - 1) / 2)

    blocks: list[list[str]] = []
    for name in sorted(ends, key=lambda name: ends[name]):
        block = [name]
        while blocks and bottom(block) < bottom(blocks[-1]) + least * len(blocks[-1]):
            block = blocks.pop() + block
        blocks.append(block)
    return {name: bottom(block) + i * least for block in blocks for i, name in enumerate(block)}


def _draw_bars(
    axes: Axes, lines: Mapping[str, Sequence[Point]], published: Mapping[str, float], published_at: str
) -> None:
    for i, (name, points) in enumerate(lines.items()):
        values = [value for point in points for value in point.values]
        axes.barh(i, statistics.median(values), alpha=0.55, color=style_of(name)["color"])
        axes.plot(values, [i] * len(values), ".", color="black", markersize=5)
        if name in published:
            diamond = {"color": "black", "fillstyle": "none", "markersize": 6, "clip_on": False}
            axes.plot(published[name], i, "D", **diamond, label=published_at)
    axes.set_yticks(range(len(lines)), [*lines])
    axes.invert_yaxis()
    if published:
        marks, texts = axes.get_legend_handles_labels()
        axes.legend(marks[:1], texts[:1], fontsize="small", frameon=False)


def _draw_table(
    axes: Axes, models: Sequence[str], tasks: Sequence[str], values: Sequence[Sequence[float]]
) -> None:
    axes.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if not math.isnan(value):
                colour = "white" if value > 0.6 else "black"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize="small", color=colour)
    axes.set_xticks(range(len(tasks)), [task.replace("_", "\n") for task in tasks], fontsize="small")
    axes.set_yticks(range(len(models)), models, fontsize="small")
