"""Where the numbers of a run go: `metrics.jsonl`, TensorBoard event files, `learning_curves.png`."""

import json
import os
from pathlib import Path
from types import TracebackType

import numpy as np

from hyena_jax.config import UserError

Values = dict[str, float]

FILE = "metrics.jsonl"


class MetricsLog:
    """Appends rows `{"step": ..., name: value, ...}`; a context manager.

    On resume, rows beyond `step` belong to work that was lost and will be done again: they are dropped, and
    TensorBoard is told to forget them too. The checkpoint of a step is saved after the step's rows.
    """

    def __init__(self, workdir: Path, step: int, tensorboard: bool):
        path = workdir / FILE
        kept = [json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= step]
        draft = path.with_suffix(".draft")
        draft.write_text("".join(kept))
        draft.rename(path)
        self._file = path.open("a", encoding="utf-8")
        self._writer = _tensorboard_writer(workdir / "tensorboard", step + 1) if tensorboard else None

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()

    def write(self, step: int, values: Values) -> None:
        """Adds a row; floats keep all their digits."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def sync(self) -> None:
        """Makes what was written last through a crash of the machine."""
        os.fsync(self._file.fileno())
        if self._writer is not None:
            self._writer.flush()


def read_rows(path: Path) -> list[dict]:
    """All rows of a metrics file; none where there is no file. A last line cut short by a kill is dropped.

    Raises:
      UserError: if another line is not a row.
    """
    if not path.exists():
        return []
    *whole, _ = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(whole, start=1):
        try:
            row = json.loads(line)
            rows.append({"step": row["step"], **row})
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} line {number} is not a row of metrics: {line[:60]!r}") from error
    return rows


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return float(np.exp(np.float64(min(loss, 700.0))))


def draw_learning_curves(workdir: Path) -> Path:
    """Draws training and validation loss against the step into `learning_curves.png`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_rows(workdir / FILE)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, label, style in (
        ("train/loss", "training (single batches)", {"color": "#9db4d0", "linewidth": 0.8}),
        ("validation/loss", "validation", {"color": "#c8442d", "marker": "o", "markersize": 3.5}),
    ):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            steps, losses = zip(*points, strict=True)
            axes.plot(steps, losses, label=f"{label}, last {losses[-1]:.3f}", **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=workdir.resolve().name)
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(frameon=False)
    path = workdir / "learning_curves.png"
    figure.savefig(path, dpi=150)
    return path


def _tensorboard_writer(folder: Path, purge_step: int) -> "tensorboardX.SummaryWriter":  # noqa: F821
    import tensorboardX

    return tensorboardX.SummaryWriter(str(folder), purge_step=purge_step)
