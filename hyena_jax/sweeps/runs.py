"""Reading runs, and grouping those that differ only in their seed."""

import itertools
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hyena_jax import config
from hyena_jax.config import Experiment, ShardsConfig, TextConfig, TokensConfig
from hyena_jax.config.files import Stage
from hyena_jax.config.registry import name_of, walk
from hyena_jax.system.errors import choose, is_unicode, require
from hyena_jax.system.files import METRICS
from hyena_jax.system.storage.mirror import opened
from hyena_jax.training.evaluate import LOWER_IS_BETTER
from hyena_jax.training.metrics import read_rows

Axis = Literal["step", "seconds", "tokens"]
HELD_OUT = "validation/"
PAUSE, LEAST_PAUSE = 20.0, 60.0
"""Between two rows is a pause if they are so many times further apart than usual, and so many seconds."""


@dataclass(frozen=True)
class Run:
    """A run folder: its experiment and its rows of metrics."""

    workdir: Path
    experiment: Experiment
    rows: Sequence[Mapping[str, Any]]
    stages: tuple[Stage, ...]
    """The values of its optimizer, with the step from which on they held."""

    @property
    def name(self) -> str:
        """The folder's name, which for a run of a sweep lists its settings."""
        return self.workdir.resolve().name

    @property
    def tokens_per_step(self) -> int | None:
        """The tokens of a training step; None for data without `seq_len`."""
        data = self.experiment.data
        return data.batch_size * data.seq_len if hasattr(data, "seq_len") else None

    @cached_property
    def settings(self) -> dict[str, str]:
        """Settings as texts, by name: those in the run's name, and the fields of its experiment.

        A field of the optimizer that was changed has all its values: `0.002; 0.001 from step 501`.
        """
        named = dict(re.findall(r"(?:^|,)([\w.]+)=([^,]*)", self.name))
        texts = {**_texts(self.experiment), **named}
        for key in {key for stage in self.stages for key in stage.values}:
            values = [(stage.first_step, stage.values.get(key)) for stage in self.stages]
            kept = values[:1] + [b for a, b in itertools.pairwise(values) if a[1] != b[1]]
            if len(kept) > 1:
                texts[key] = "; ".join(
                    [str(kept[0][1]), *(f"{value} from step {step}" for step, value in kept[1:])]
                )
        return texts

    def settings_but(self, field: str, only: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Its settings without its seed and `field`; those of `only`, if it names some."""
        ends = f".{_as_field(field)}"  # the run's name has the last part alone

        def is_it(key: str) -> bool:
            return key == "seed" or ends.endswith(f".{key}") or key.endswith(ends)

        kept = [*map(_as_field, only)] or sorted(key for key in self.settings if not is_it(key))
        return tuple((name, self.settings.get(name, "absent")) for name in kept)

    @property
    def changed(self) -> str:
        """` (optimizer changed at step 501)`, to follow the run's name; empty if it was not."""
        steps = [str(stage.first_step) for stage in self.stages[1:]]
        return f" (optimizer changed at step {', '.join(steps)})" if steps else ""

    @cached_property
    def seconds(self) -> dict[int, float]:
        """The seconds of training until each step that has a row, without pauses between two starts."""
        times = {row["step"]: row["time"] for row in self.rows if row.get("time") is not None}
        steps = sorted(times)
        pairs = [(a, b, times[b] - times[a]) for a, b in itertools.pairwise(steps)]
        # The lower of two middle ones: of two pairs of rows, a pause is one.
        rates = [seconds / (b - a) for a, b, seconds in pairs if seconds >= 0]  # a clock may be set back
        usual = statistics.median_low(rates) if rates else math.nan
        total = {steps[0]: usual * steps[0]} if steps else {}
        for a, b, seconds in pairs:
            most = usual * (b - a)
            total[b] = total[a] + (seconds if 0 <= seconds <= max(PAUSE * most, LEAST_PAUSE) else most)
        return total

    @cached_property
    def metrics(self) -> list[str]:
        """The names of the values on held-out data, in the order of their first finite measurement."""
        known = (name for row in self.rows for name, value in row.items() if value is not None)
        names = dict.fromkeys(name for name in known if name.startswith(HELD_OUT))
        return [name.removeprefix(HELD_OUT) for name in names]

    def held_out(self, metric: str) -> dict[int, float]:
        """A held-out value by step; NaN where it was not finite."""
        values = {row["step"]: row[HELD_OUT + metric] for row in self.rows if HELD_OUT + metric in row}
        return {step: math.nan if value is None else value for step, value in values.items()}


@dataclass(frozen=True)
class Group:
    """Runs that are one line of the figure and one row of the table."""

    label: str
    runs: tuple[Run, ...]


def read_runs(folders: str | Path | Sequence[str | Path]) -> tuple[list[Run], list[str]]:
    """The runs in a folder or in several, each a run's or one that holds runs, such as a sweep's.

    Also returns the names of those inside a folder that have not been evaluated, which are left out.
    UserError if a folder holds no run that was evaluated.
    """
    folders = [folders] if isinstance(folders, str | Path) else folders
    require(len(folders) > 0, "DIR", folders, "at least one folder")
    found: dict[Path, Run] = {}
    left_out: list[str] = []
    for folder in map(opened, folders):
        require(folder.is_dir(), "DIR", str(folder), "a folder")
        within = sorted(path for path in folder.iterdir() if path.is_dir())
        left_out += [f"{path.name!r} (a name that is not UTF-8)" for path in within if not is_unicode(path)]
        within = [path for path in within if is_unicode(path) and config.is_run(path)]
        inside = [folder] if config.is_run(folder) else within
        require(len(inside) > 0, "DIR", str(folder), "the folder of a run, or one with such folders in it")
        runs = []
        for workdir in inside:
            experiment, rows = config.read_run(workdir), read_rows(workdir / METRICS)
            runs.append(Run(workdir, experiment, rows, config.read_stages(workdir, experiment)))
        evaluated = [run for run in runs if run.metrics]
        must = "a run with at least one evaluation, or with such runs"
        require(len(evaluated) > 0, "DIR", str(folder), must)
        left_out += [run.name for run in runs if not run.metrics]
        found |= {run.workdir.resolve(): run for run in evaluated}
    return list(found.values()), left_out


def group(runs: Sequence[Run], by: Sequence[str] = (), best_by: str | None = None) -> list[Group]:
    """The runs in groups: those that differ only in their seed, or those with the same values of fields.

    `by` are fields such as `model.d_model`, or axes of the sweep, such as `variant`; `best_by` is one that
    must be known too.
    """
    groups: dict[str, list[Run]] = {}
    known = dict.fromkeys(key for run in runs for key in run.settings)
    fields = [*map(_as_field, by)]
    for name, field in [*(("by", field) for field in fields), ("best_by", best_by and _as_field(best_by))]:
        if field is not None and field not in known:
            outer = [key for key in known if key.count(".") < 2]  # few enough to be listed
            differ = [key for key in outer if len({run.settings.get(key) for run in runs}) > 1]
            choose(name, field, dict.fromkeys(differ or outer))
    if by:
        for run in runs:
            label = ",".join(f"{field}={run.settings.get(field, 'absent')}" for field in fields)
            groups.setdefault(label, []).append(run)
        return [Group(label, tuple(members)) for label, members in groups.items()]
    for run in runs:
        groups.setdefault(repr((replace(run.experiment, seed=0), run.stages)), []).append(run)
    first = [members[0] for members in groups.values()]
    labels = [(without_seed(run.name) or run.workdir.resolve().parent.name) + run.changed for run in first]
    if len({*labels}) < len(labels):
        labels = [f"{run.workdir}{run.changed}" for run in first]
    return [Group(label, tuple(members)) for label, members in zip(labels, groups.values(), strict=True)]


def _as_field(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def without_seed(name: str) -> str:
    """The name of a sweep's run, without its seed: the name of its group."""
    return re.sub(r"(^|,)seed=\d+", "", name).strip(",")


def choose_metric(runs: Sequence[Run], metric: str | None) -> str:
    """The metric to compare: the named one; or the loss of language models, else the first accuracy.

    If not all runs measured that, it is the loss, or the first value that they have in common.

    UserError if a run has not measured the named one.
    """
    measured = [run.metrics for run in runs]
    common = {name: None for name in measured[0] if all(name in names for names in measured)}
    if metric is not None:
        choose("metric", metric, common)
        return metric
    require(len(common) > 0, "DIR", ", ".join(run.name for run in runs[:2]), "of runs with a value in common")
    loss = "loss" if "loss" in common else next(iter(common))
    if all(isinstance(run.experiment.data, TextConfig | TokensConfig | ShardsConfig) for run in runs):
        return loss
    return next((name for name in common if name.endswith("accuracy")), loss)


def is_better(metric: str, a: float, b: float) -> bool:
    """Whether a value of the metric is better than another."""
    return a < b if metric in LOWER_IS_BETTER else a > b


def _texts(experiment: Experiment) -> dict[str, str]:
    """All values of an experiment as texts, by dotted path; a part by its type."""

    def kind(part: Any) -> str:
        return name_of(part) if hasattr(part, "registry") else "" if is_dataclass(part) else str(part)

    found = {}
    for path, value, _ in walk(experiment):
        if isinstance(value, tuple):
            found[path] = ",".join(map(kind, value))
        elif hasattr(value, "registry"):
            found[path] = found[f"{path}.type"] = kind(value)
        elif not is_dataclass(value):
            found[path] = str(value) if isinstance(value, str | Path) else json.dumps(value)
    return found
