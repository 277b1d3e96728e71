"""A picture of held-out images with a classifier's predictions."""

import math
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax

from hyena_jax.data.dataset import Dataset
from hyena_jax.system import files
from hyena_jax.training.loss import answers

RIGHT, WRONG = "#333333", "#c8442d"
COLUMNS = 8


def has_labels(data: Dataset) -> bool:
    """Whether each row of the data has one integer as its target."""
    targets = next(data.eval_batches(1, 1))["targets"]
    return targets.ndim == 1 and targets.dtype.kind == "i"


def draw_predictions(
    model: nn.Module, params: optax.Params, data: Dataset, count: int, path: Path
) -> tuple[int, int]:
    """Draws `count` evenly spaced held-out images (or all) with their predicted labels.

    Wrong predictions are red, with the true label next to them.

    Returns:
      How many predictions are right, and how many images were drawn.
    """
    count = data.n_eval_rows(count)
    (batch,) = data.eval_batches(count, count)
    logits = jax.jit(model.apply)({"params": params}, batch["inputs"])
    predicted, true = np.asarray(answers(logits, 1)), batch["targets"]
    n_right = int((predicted == true).sum())
    _draw(batch["inputs"], predicted, true, f"{n_right} of {count} held-out images right", path)
    return n_right, count


def _draw(images: np.ndarray, predicted: np.ndarray, true: np.ndarray, title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    n_rows = math.ceil(len(images) / COLUMNS)
    figure = Figure(figsize=(COLUMNS, 0.5 + 1.2 * n_rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    shades = (images - images.min()) / (images.max() - images.min())
    panels = figure.subplots(n_rows, COLUMNS, squeeze=False).ravel()
    for axes in panels:
        axes.set_axis_off()
    for axes, image, answer, label in zip(panels[: len(images)], shades, predicted, true, strict=True):
        axes.imshow(image, cmap="gray_r")
        is_right = answer == label
        text = f"{answer}" if is_right else f"{answer}, not {label}"
        axes.set_title(text, fontsize=9, color=RIGHT if is_right else WRONG, pad=3)
    with files.replacing(path) as draft:
        figure.savefig(draft, format="png", dpi=110)
