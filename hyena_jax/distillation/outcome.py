"""The results of distillation: a run folder, tables, JSON and a figure."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.table import Table

from hyena_jax.distillation.model import Original, Spectra, Tried
from hyena_jax.training.checkpoint import Checkpoints, Meta
from hyena_jax.training.evaluate import measured_on
from hyena_jax.training.folder import CHECKPOINTS, write_description
from hyena_jax.training.metrics import Values
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import init_state

# For each size n, tables show the singular value number n + 1.
SHOWN = (2, 4, 8, 16, 32, 64, 128, 256)
# Smallest value on a logarithmic axis.
LEAST_SHOWN = 1e-16
CONFIG_FILE = "config.py"
CONFIG = '''"""This folder's experiment; to continue: hyena-jax train THIS_FILE --workdir THIS_FOLDER."""

from pathlib import Path

from hyena_jax import config


def get_config():
    return config.read(Path(__file__).with_name("config.json"))
'''


class Outcome(NamedTuple):
    """Results to report."""

    original: Original
    before: Values
    spectra: list[Spectra]
    tried: list[Tried]
    max_filter_error: float
    max_loss_increase: float

    @property
    def last(self) -> Tried:
        """The chosen size, the last of `tried`."""
        return self.tried[-1]

    def increase(self, tried: Tried) -> float:
        """Nats by which the validation loss grows at a size."""
        return tried.values["loss"] - self.before["loss"]

    @property
    def keeps(self) -> bool:
        """Whether the chosen size keeps to the bound on the loss."""
        return self.increase(self.last) <= self.max_loss_increase


def write_run(folder: Path, found: Outcome) -> None:
    """Writes the chosen size as a run at step 0: config, data.json, a checkpoint with a fresh optimizer."""
    experiment, params = found.last.experiment, found.last.params
    write_description(folder, experiment, found.original.about_data)
    (folder / CONFIG_FILE).write_text(CONFIG, encoding="utf-8")
    optimizer = make_optimizer(experiment.optimizer, params, experiment.training.steps)
    state = jax.device_get(init_state(params, optimizer))
    with Checkpoints(folder / CHECKPOINTS, experiment.training.keep_checkpoints, print) as checkpoints:
        measured = (found.last.values["loss"], measured_on(found.original.data))
        in_nats = experiment.loss.in_nats  # else the run measures something else
        checkpoints.save(Meta(0, *measured) if in_nats else Meta(0), state.to_items())


def tables(found: Outcome) -> Iterator[Table]:
    """Singular values by layer, losses by state size, filter errors at the last size."""
    yield _singular_values(found)

    table = Table("state size", "filter error", "loss", "increase", "KL", box=None)
    table.title = "Validation loss and KL(run || distilled), nats per token"
    table.add_row("the run", "", f"{found.before['loss']:.4f}", "", "")
    for tried in found.tried:
        error = max(error.error for error in tried.errors)
        table.add_row(
            str(tried.size),
            f"{error:.2e}",
            f"{tried.values['loss']:.4f}",
            f"{found.increase(tried):+.4f}",
            f"{tried.values['kl']:.2e}",
        )
    yield table

    table = Table("filter", "error", "at least", "balanced, at most", "worst channel", box=None)
    table.title = f"Filters at state size {found.last.size}: relative L2 error over all channels"
    for error in found.last.errors:
        table.add_row(
            _name(error.layer, error.filter),
            f"{error.error:.2e}",
            f"{error.least:.2e}",
            f"{error.balanced:.2e}",
            f"{error.worst_channel} ({error.worst_error:.2e})",
        )
    yield table


def verdict(found: Outcome) -> str:
    """One line: whether the last size keeps to the bound on the loss, and how far its filters are off."""
    last, most, keeps = found.last, found.max_loss_increase, found.keeps
    far = [error for error in last.errors if error.error > found.max_filter_error]
    text = (
        f"state size {last.size} {'keeps' if keeps else 'does not keep'} to the bound: the loss changes by"
        f" {found.increase(last):+.4f} nats, at most {most:+g} allowed; KL {last.values['kl']:.2e}"
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


def to_json(found: Outcome) -> dict[str, Any]:
    """All results as JSON values."""
    last, most = found.last, found.max_filter_error
    return {
        "step": found.original.step,
        "max_len": found.original.max_len,
        "state_size": last.size,
        "n_modes": last.size // 2,
        "before": found.before,
        "after": last.values,
        "max_filter_error": found.max_filter_error,
        "max_loss_increase": found.max_loss_increase,
        "keeps_to_the_bound": found.keeps,
        "tried": [
            {
                "state_size": tried.size,
                **tried.values,
                "loss_increase": found.increase(tried),
                "filters": [
                    {**error._asdict(), "within_max_filter_error": error.error <= most}
                    for error in tried.errors
                ],
            }
            for tried in found.tried
        ],
        "hankel_singular_values": [
            {
                "layer": filters.layer,
                "rows": (found.original.max_len - 1) // 2,
                "median": np.median(relative, axis=0).tolist(),
                "largest": relative.max(axis=0).tolist(),
            }
            for filters, relative in _relative(found)
        ],
    }


def draw(found: Outcome, path: Path) -> None:
    """Draws Hankel singular values by layer, filters before and after, and the errors of all channels."""
    from matplotlib.figure import Figure

    size = found.last.size
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    values, filters, errors = figure.subplots(1, 3)
    for of_layer, relative in _relative(found):
        number = np.arange(1, relative.shape[1] + 1)
        median, largest = np.median(relative, axis=0), relative.max(axis=0)
        (line,) = values.semilogy(number, np.maximum(median, LEAST_SHOWN), label=f"layer {of_layer.layer}")
        values.semilogy(number, np.maximum(largest, LEAST_SHOWN), ":", color=line.get_color())
    values.axvline(size, color="grey", linestyle="--", linewidth=1)
    values.set(xlabel="number (dashed: state size)", ylabel="relative to the largest")
    values.set_title("Hankel singular values")
    values.legend(frameon=False, title="median; dotted: largest")
    for before, after in zip(found.original.filters, found.last.filters, strict=True):
        error = np.linalg.norm(after.later - before.later, axis=1)
        channel, lags = int(np.argsort(error)[len(error) // 2]), np.arange(1, before.later.shape[1] + 1)
        (line,) = filters.plot(lags, before.later[channel], linewidth=2.5, alpha=0.4)
        filters.plot(lags, after.later[channel], color=line.get_color(), linewidth=1)
        relative = np.sort(error / np.maximum(np.linalg.norm(before.later, axis=1), LEAST_SHOWN))
        errors.semilogy(np.maximum(relative, LEAST_SHOWN), label=f"layer {before.layer}")
    filters.set(xlabel="lag", ylabel="filter", title="Channels of median error: before (wide), after")
    errors.axhline(found.max_filter_error, color="grey", linestyle="--", linewidth=1)
    errors.set(xlabel="channel, by error", ylabel="relative L2 error", title=f"Errors at state size {size}")
    errors.legend(frameon=False)
    figure.savefig(path, dpi=130)


def _singular_values(found: Outcome) -> Table:
    n_known = min(relative.shape[1] for _, relative in _relative(found))  # of long filters only the first
    sizes = [size for size in SHOWN if size < n_known] or [n_known - 1]
    table = Table("layer", *(f"{size + 1}." for size in sizes), box=None)
    table.title = "Hankel singular values, relative to the largest: median (largest) over channels"
    for filters, relative in _relative(found):
        cells = [f"{np.median(relative[:, n]):.1e} ({relative[:, n].max():.1e})" for n in sizes]
        table.add_row(str(filters.layer), *cells)
    return table


def _relative(found: Outcome) -> Iterator[tuple[Any, np.ndarray]]:
    """Each layer's filters and singular values [C, k], relative to each channel's largest."""
    for filters, spectra in zip(found.original.filters, found.spectra, strict=True):
        values = spectra.alone.values
        yield filters, values / np.maximum(values[:, :1], LEAST_SHOWN)


def _name(layer: int, number: int) -> str:
    return f"layer {layer}, filter {number}"
