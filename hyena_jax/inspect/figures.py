"""Figures of what this package computes, for notebooks and pages of documentation.

Every function returns a `matplotlib.figure.Figure`; `figure.savefig(path)` writes it. Axes: L length, N
filters, D channels, W channels of a recurrence, k singular values.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hyena_jax.inspect.mixers import spectrum
from hyena_jax.system.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEFORE, AFTER = "#8a8f98", "#c8442d"
# Most tokens whose labels are written along an axis.
MAX_LABELS = 80


def draw_mixing(matrices: Mapping[str, np.ndarray], labels: Sequence[str] | None = None) -> "Figure":
    """Matrices [L, L], next to each other, by their titles: rows are outputs, columns the inputs they read.

    A matrix without negative entries runs from white to black, another from blue over white to red. Each row
    is divided by its largest magnitude, since rows differ by their gates. `labels` are the L tokens.
    """
    figure = _figure(4.4 * len(matrices), 5.6)
    for axes, (title, matrix) in zip(
        figure.subplots(1, len(matrices), squeeze=False)[0], matrices.items(), strict=True
    ):
        matrix = np.asarray(matrix)
        largest = np.abs(matrix).max(axis=1, keepdims=True)
        rows, signed = matrix / np.where(largest > 0, largest, 1), bool((matrix < 0).any())
        image = axes.imshow(rows, cmap="RdBu_r" if signed else "Greys", vmin=-1 if signed else 0, vmax=1)
        scale = {"location": "bottom", "shrink": 0.6, "aspect": 40, "ticks": [-1, 0, 1] if signed else [0, 1]}
        figure.colorbar(image, ax=axes, label="weight, relative to the row's largest", **scale)
        axes.set_title(title, fontsize=10)
        axes.set(xlabel="read from", ylabel="token")
        if labels is not None and len(labels) <= MAX_LABELS:
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_ticks(range(len(labels)), labels, fontsize=6, family="monospace", parse_math=False)
                axis.set_tick_params(length=0)
    return figure


def draw_filters(
    before: np.ndarray, after: np.ndarray, channels: Sequence[int] = (0,), filter_index: int = 0
) -> "Figure":
    """Channels of a filter over the lags and their spectra, before and after training; both are [N, D, L]."""
    figure = _figure(9, 1.2 + 1.7 * len(channels))
    panels = figure.subplots(len(channels), 2, squeeze=False)
    for (over_lags, over_frequencies), channel in zip(panels, channels, strict=True):
        for h, colour, label in ((before, BEFORE, "before training"), (after, AFTER, "after")):
            taps = np.asarray(h)[filter_index, channel]
            over_lags.plot(taps, color=colour, label=label, linewidth=1.2)
            magnitudes = spectrum(taps)
            frequencies = np.arange(len(magnitudes)) / (2 * len(taps))
            decibels = 20 * np.log10(np.maximum(magnitudes, 1e-6 * max(magnitudes.max(), 1e-30)))
            over_frequencies.plot(frequencies, decibels, color=colour, linewidth=1.2)
        over_lags.set_ylabel(f"channel {channel}")
        over_lags.axhline(0, color="#bbbbbb", linewidth=0.6, zorder=0)
    panels[0, 0].legend(frameon=False, fontsize=8)
    panels[0, 0].set_title("filter h", fontsize=10)
    panels[0, 1].set_title("magnitude of its Fourier transform, dB", fontsize=10)
    panels[-1, 0].set_xlabel("lag (tokens)")
    panels[-1, 1].set_xlabel("frequency (cycles per token)")
    return figure


def draw_hankel(before: np.ndarray, after: np.ndarray) -> "Figure":
    """Hankel singular values [..., k] before and after, relative to the largest: median and quartiles."""
    figure = _figure(5, 3.4)
    axes = figure.subplots()
    for values, colour, label in ((before, BEFORE, "before training"), (after, AFTER, "after")):
        values = np.asarray(values).reshape(-1, np.shape(values)[-1])
        relative = values / np.where(values[:, :1] > 0, values[:, :1], 1)
        low, middle, high = np.maximum(np.quantile(relative, (0.25, 0.5, 0.75), axis=0), 1e-16)
        order = np.arange(1, len(middle) + 1)
        axes.semilogy(order, middle, color=colour, label=label)
        axes.fill_between(order, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.set(xlabel="index", ylabel="Hankel singular value relative to the largest")
    axes.legend(frameon=False)
    return figure


def draw_gates(gates: Mapping[str, np.ndarray], memory: np.ndarray) -> "Figure":
    """Gates [L, W] over time, by name, channels sorted by their memory lengths [W], which are drawn below."""
    figure = _figure(3.2 * len(gates), 5.2)
    panels = figure.subplots(2, len(gates), squeeze=False, height_ratios=[2, 1])
    order = np.argsort(memory)
    for axes, (name, values) in zip(panels[0], gates.items(), strict=True):
        image = axes.imshow(np.asarray(values)[:, order].T, aspect="auto", origin="lower", cmap="viridis")
        axes.set(title=name, xlabel="token", ylabel="channel, by memory length")
        figure.colorbar(image, ax=axes)
    for spare in panels[1, 1:]:
        spare.set_axis_off()
    panels[1, 0].semilogy(np.asarray(memory)[order], color=AFTER)
    panels[1, 0].set(xlabel="channel, by memory length", ylabel="memory length (tokens)")
    return figure


def draw_losses(losses: np.ndarray, labels: Sequence[str]) -> "Figure":
    """The losses of tokens [L] in nats; NaN where there is none."""
    require(len(losses) == len(labels), "labels", len(labels), f"as many as losses, {len(losses)}")
    figure = _figure(max(4, 0.14 * len(labels)), 3)
    axes = figure.subplots()
    axes.bar(np.arange(len(labels)), np.asarray(losses), color=AFTER, width=0.9)
    axes.set(ylabel="loss (nats)", xlim=(-0.5, len(labels) - 0.5))
    if len(labels) <= MAX_LABELS:
        axes.set_xticks(range(len(labels)), labels, fontsize=7, family="monospace", parse_math=False)
    return figure


def draw_activations(stream: np.ndarray, mixer: np.ndarray, mlp: np.ndarray) -> "Figure":
    """Root mean squares by layer: the stream before each and at the end [n + 1], what mixer, mlp add [n]."""
    figure = _figure(5, 3.4)
    axes = figure.subplots()
    axes.plot(np.arange(len(stream)), stream, marker="o", color="#333333", label="residual stream")
    for values, colour, label in ((mixer, AFTER, "added by the mixer"), (mlp, "#3b6ea8", "added by the MLP")):
        axes.plot(
            np.arange(len(values)) + 0.5, values, marker="s", linestyle="none", color=colour, label=label
        )
    axes.set(xlabel="after layer", ylabel="root mean square over channels", ylim=(0, None))
    axes.legend(frameon=False)
    return figure


def draw_patches(image: np.ndarray, weights: np.ndarray, grid: tuple[int, int], patch: int) -> "Figure":
    """How the output at one patch of an image reads all patches.

    Args:
      image: [height, width, colours].
      weights: row `patch` of a mixing matrix, [rows * columns] of patches in row-major order.
      grid: rows and columns of patches.
      patch: its index, marked by a frame.
    """
    rows, columns = grid
    require(len(weights) == rows * columns, "weights", len(weights), f"rows * columns = {rows * columns}")
    figure = _figure(7, 3.4)
    left, right = figure.subplots(1, 2)
    height, width = image.shape[0] / rows, image.shape[1] / columns
    shades = (image - image.min()) / max(image.max() - image.min(), 1e-12)
    left.imshow(shades if image.shape[-1] == 3 else shades[..., 0], cmap="gray_r")
    most = max(np.abs(weights).max(), 1e-30)
    shown = right.imshow(np.reshape(weights, grid), cmap="RdBu_r", vmin=-most, vmax=most)
    figure.colorbar(shown, ax=right)
    row, column = divmod(patch, columns)
    _frame(left, column * width - 0.5, row * height - 0.5, width, height)
    _frame(right, column - 0.5, row - 0.5, 1, 1)
    left.set_title("image", fontsize=10)
    right.set_title("what the framed patch reads", fontsize=10)
    for axes in (left, right):
        axes.set_axis_off()
    return figure


def _frame(axes: "Axes", x: float, y: float, width: float, height: float) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=AFTER, linewidth=2))


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
