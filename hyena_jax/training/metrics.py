"""The metrics of a run: `metrics.jsonl`, which trackers are given too, and `learning_curves.png`."""

import json
import math
import operator
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from hyena_jax.system import files
from hyena_jax.system.errors import UserError
from hyena_jax.system.files import METRICS, memory_size, parse_json, read_bytes
from hyena_jax.training.trackers import Tracker

Values = dict[str, float]


class MetricsLog(AbstractContextManager):
    """Appends rows `{"step": ..., "time": ..., name: value, ...}`; a context manager.

    `time` is in seconds since 1970 (UTC). Values that are not finite are written as null, since JSON has no
    infinity. On resume, rows beyond `step` are dropped: their steps were lost and will be repeated; so is
    the evaluation of `step` with `evaluates_again`. The checkpoint of a step is saved after its rows.
    """

    def __init__(
        self,
        workdir: Path,
        step: int,
        tracker: Tracker | None = None,
        put: Callable[[], None] = lambda: None,
        evaluates_again: bool = False,
    ):
        """`tracker` is given each row too, and flushed with the file; whoever made it closes it. `put` is
        called once they are flushed."""
        path = workdir / METRICS
        last = step - 1 if evaluates_again else step
        kept = [row for row in read_rows(path) if row["step"] <= (last if "validation/loss" in row else step)]
        files.write_text(path, "".join(map(_line, kept)))
        self._file = path.open("a", encoding="utf-8")
        self._tracker, self._put = tracker, put

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def write(self, step: int, values: Values) -> None:
        """Adds a row; floats keep all their digits."""
        self._file.write(_line({"step": step, "time": round(time.time(), 3), **values}))
        self._file.flush()
        if self._tracker is not None:
            self._tracker.write(step, values)

    def sync(self) -> None:
        """Flushes, so that written rows survive a crash of the machine."""
        os.fsync(self._file.fileno())
        if self._tracker is not None:
            self._tracker.sync()
        self._put()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(without_infinities(row), allow_nan=False) + "\n"


def without_infinities(row: Mapping[str, Any]) -> dict[str, Any]:
    """The values, also in inner dicts, with None in the place of infinity and NaN, which JSON lacks."""

    def known(x: Any) -> Any:
        if isinstance(x, Mapping):
            return without_infinities(x)
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return {name: known(x) for name, x in row.items()}


class NoLog:
    """A `MetricsLog` that writes nothing, for every process but the first."""

    def write(self, step: int, values: Values) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""


def read_rows(path: Path) -> list[dict]:
    """All rows of a metrics file; none without a file. Drops a last line cut short by a kill, refuses
    others."""
    if not path.exists():
        return []
    *whole, _ = read_bytes("metrics", path, memory_size()).split(b"\n")
    rows = []
    for number, line in enumerate(whole, start=1):
        try:
            row = parse_json(line)
            rows.append({"step": operator.index(row["step"]), **row})
            for value in row.values():  # null, or a number that fits a float
                math.isfinite(0 if value is None else value)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError(
                f"{path} line {number} is not a row of metrics: {line[:60].decode(errors='replace')!r};"
                " remove that line or the file to continue"
            ) from error
    return rows


def draw_learning_curves(workdir: Path, labels: dict[str, str]) -> Path:
    """Draws metrics against the step into `learning_curves.png`, one below the other.

    `labels` are those of the axes, by metric.
    """
    from matplotlib.figure import Figure

    rows = read_rows(workdir / METRICS)
    figure = Figure(figsize=(7, 1.4 + 2.8 * len(labels)), layout="constrained")
    panels = figure.subplots(len(labels), sharex=True, squeeze=False)[:, 0]
    for axes, (name, label) in zip(panels, labels.items(), strict=True):
        for part, called, style in (
            ("train", "training (single batches)", {"color": "#9db4d0", "linewidth": 0.8}),
            ("validation", "validation", {"color": "#c8442d", "marker": "o", "markersize": 3.5}),
        ):
            values = ((row["step"], row.get(f"{part}/{name}")) for row in rows)
            points = [(step, value) for step, value in values if value is not None]
            if points:
                steps, values = zip(*points, strict=True)
                style = style if len(steps) > 1 else {**style, "marker": "o", "markersize": 7}
                axes.plot(steps, values, label=f"{called}, last {values[-1]:.3f}", **style)
        axes.grid(alpha=0.25)
        if axes.lines:
            axes.legend(frameon=False)
        axes.set(ylabel=label)
    panels[0].set_title(workdir.resolve().name, parse_math=False)  # a name may hold dollar signs
    panels[-1].set(xlabel="step")
    path = workdir / "learning_curves.png"
    with files.replacing(path) as draft:
        figure.savefig(draft, format="png", dpi=150)
    return path
