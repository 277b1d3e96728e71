"""The results of distillation as tables, as JSON and as a figure."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from hyena_jax.distillation.measure import FilterError, Spectra
from hyena_jax.distillation.sizes import Source, Tried
from hyena_jax.training.metrics import Values

# For each size n, tables show the singular value number n + 1.
SHOWN = (2, 4, 8, 16, 32, 64, 128, 256)
# Smallest value on a logarithmic axis.
LEAST_SHOWN = 1e-16


class Found(NamedTuple):
    """Results to report; the last of `tried` is the chosen size."""

    source: Source
    before: Values
    spectra: list[Spectra]
    tried: list[Tried]
    max_filter_error: float
    max_loss_increase: float


def tables(found: Found) -> Iterator[Table]:
    """Singular values by layer, losses by state size, filter errors at the last size."""
    yield _singular_values(found)
    yield _losses(found)
    yield _filters(found)


def verdict(found: Found) -> str:
    """One line: whether the last size keeps to the bound on the loss, and how far its filters are off."""
    last, most = found.tried[-1], found.max_loss_increase
    growth = loss_increase(found)
    keeps = growth <= most
    far = [error for error in last.errors if error.error > found.max_filter_error]
    text = (
        f"state size {last.size} {'keeps' if keeps else 'does not keep'} to the bound: the loss changes by"
        f" {growth:+.4f} nats, at most {most:+g} allowed; KL {last.values['kl']:.2e}"
    )
    if not far:
        return text
    names = ", ".join(_name(error.layer, error.filter) for error in far[:3]) + (", ..." if far[3:] else "")
    hence = " (the model hardly uses what is lost)" if keeps else ""
    are = "filter is" if len(last.errors) == 1 else "filters are"
    return (
        f"{text}. {len(far)} of {len(last.errors)} {are} off by more than"
        f" {found.max_filter_error:g}{hence}: {names}"
    )


def loss_increase(found: Found) -> float:
    """Nats by which the validation loss grows at the last size."""
    return found.tried[-1].values["loss"] - found.before["loss"]


def to_json(found: Found) -> dict[str, Any]:
    """All results as JSON values."""
    last = found.tried[-1]
    return {
        "step": found.source.step,
        "max_len": found.source.max_len,
        "state_size": last.size,
        "n_modes": last.size // 2,
        "before": found.before,
        "after": last.values,
        "max_filter_error": found.max_filter_error,
        "max_loss_increase": found.max_loss_increase,
        "keeps_to_the_bound": loss_increase(found) <= found.max_loss_increase,
        "tried": [
            {
                "state_size": tried.size,
                **tried.values,
                "loss_increase": tried.values["loss"] - found.before["loss"],
                "filters": [_filter_json(error, found.max_filter_error) for error in tried.errors],
            }
            for tried in found.tried
        ],
        "hankel_singular_values": [
            {
                "layer": filters.layer,
                "rows": (found.source.max_len - 1) // 2,
                "median": np.median(relative, axis=0).tolist(),
                "largest": relative.max(axis=0).tolist(),
            }
            for filters, relative in _relative(found)
        ],
    }


def draw(found: Found, path: Path) -> None:
    """Draws Hankel singular values by layer, filters before and after, and the errors of all channels."""
    from matplotlib.figure import Figure

    size = found.tried[-1].size
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    values, filters, errors = figure.subplots(1, 3)
    _draw_singular_values(values, found)
    values.axvline(size, color="grey", linestyle="--", linewidth=1)
    values.set(xlabel="number (dashed: state size)", ylabel="relative to the largest")
    values.set_title("Hankel singular values")
    values.legend(frameon=False, title="median; dotted: largest")
    for before, after in zip(found.source.filters, found.tried[-1].filters, strict=True):
        error = np.linalg.norm(after.later - before.later, axis=1)
        _draw_filter(filters, before.later, after.later, int(np.argsort(error)[len(error) // 2]))
        relative = np.sort(error / np.maximum(np.linalg.norm(before.later, axis=1), LEAST_SHOWN))
        errors.semilogy(np.maximum(relative, LEAST_SHOWN), label=f"layer {before.layer}")
    filters.set(xlabel="lag", ylabel="filter", title="Channels of median error: before (wide), after")
    errors.axhline(found.max_filter_error, color="grey", linestyle="--", linewidth=1)
    errors.set(xlabel="channel, by error", ylabel="relative L2 error", title=f"Errors at state size {size}")
    errors.legend(frameon=False)
    figure.savefig(path, dpi=130)


def _draw_singular_values(axes: Any, found: Found) -> None:
    for filters, relative in _relative(found):
        number = np.arange(1, relative.shape[1] + 1)
        median, largest = np.median(relative, axis=0), relative.max(axis=0)
        (line,) = axes.semilogy(number, np.maximum(median, LEAST_SHOWN), label=f"layer {filters.layer}")
        axes.semilogy(number, np.maximum(largest, LEAST_SHOWN), ":", color=line.get_color())


def _draw_filter(axes: Any, before: np.ndarray, after: np.ndarray, channel: int) -> None:
    lags = np.arange(1, before.shape[1] + 1)
    (line,) = axes.plot(lags, before[channel], linewidth=2.5, alpha=0.4)
    axes.plot(lags, after[channel], color=line.get_color(), linewidth=1)


def _singular_values(found: Found) -> Table:
    n_known = min(relative.shape[1] for _, relative in _relative(found))  # of long filters only the first
    sizes = [size for size in SHOWN if size < n_known] or [n_known - 1]
    table = Table("layer", *(f"{size + 1}." for size in sizes), box=None)
    table.title = "Hankel singular values, relative to the largest: median (largest) over channels"
    for filters, relative in _relative(found):
        cells = [f"{np.median(relative[:, n]):.1e} ({relative[:, n].max():.1e})" for n in sizes]
        table.add_row(str(filters.layer), *cells)
    return table


def _losses(found: Found) -> Table:
    table = Table("state size", "filter error", "loss", "increase", "KL", box=None)
    table.title = "Validation loss and KL(run || distilled), nats per token"
    table.add_row("the run", "", f"{found.before['loss']:.4f}", "", "")
    for tried in found.tried:
        error = max(error.error for error in tried.errors)
        increase = tried.values["loss"] - found.before["loss"]
        table.add_row(
            str(tried.size),
            f"{error:.2e}",
            f"{tried.values['loss']:.4f}",
            f"{increase:+.4f}",
            f"{tried.values['kl']:.2e}",
        )
    return table


def _filters(found: Found) -> Table:
    table = Table("filter", "error", "at least", "balanced, at most", "worst channel", box=None)
    table.title = f"Filters at state size {found.tried[-1].size}: relative L2 error over all channels"
    for error in found.tried[-1].errors:
        table.add_row(
            _name(error.layer, error.filter),
            f"{error.error:.2e}",
            f"{error.least:.2e}",
            f"{error.balanced:.2e}",
            f"{error.worst_channel} ({error.worst_error:.2e})",
        )
    return table


def _relative(found: Found) -> Iterator[tuple[Any, np.ndarray]]:
    """Each layer's filters and singular values [C, k], relative to each channel's largest."""
    for filters, spectra in zip(found.source.filters, found.spectra, strict=True):
        values = spectra.alone.values
        yield filters, values / np.maximum(values[:, :1], LEAST_SHOWN)


def _filter_json(error: FilterError, most: float) -> dict[str, Any]:
    return {**error._asdict(), "within_max_filter_error": error.error <= most}


def _name(layer: int, number: int) -> str:
    return f"layer {layer}, filter {number}"
