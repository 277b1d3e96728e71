"""`hyena-jax distill`: fits recurrences, measures the loss, chooses a size, prints and writes."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hyena_jax.cli.base import OfRun, fail, note, table_console, unread
from hyena_jax.config import UserError, plugin_flags, read_json, require
from hyena_jax.config.checks import require_at_least
from hyena_jax.files import require_free
from hyena_jax.startup import keep_freed_memory, start_jax

if TYPE_CHECKING:
    from rich.console import Console

    from hyena_jax.distillation.sizes import Source, Tried

# Sizes that `auto` tries, up to max_len: a state of max_len numbers could just as well store the inputs.
AUTO_SIZES = (4, 8, 16, 32, 64, 128, 256)


class NoSizeHolds(Exception):
    """No state size keeps the loss within the bound; nothing was written."""


@dataclass(frozen=True, kw_only=True)
class Distill(OfRun):
    """Replace the long filters of a run on text by small recurrences, in a new run folder."""

    output: Path
    """Folder of the new run; must not exist, or be empty."""
    state_size: int | Literal["auto"] = "auto"
    """Real state size per channel, an even number: twice the complex modes. `auto` takes the smallest power
    of two from 4 that stays within --max-loss-increase."""
    max_loss_increase: float = 0.01
    """Largest allowed increase of the validation loss in nats, by which `auto` chooses the size."""
    max_filter_error: float = 0.1
    """Relative L2 error above which a filter is reported as far off."""
    path: str | None = None
    """Text file or folder to measure losses on, instead of the run's held-out data."""
    batch_size: int = 64
    """Sequences evaluated at once; does not change the result."""
    seed: int = 0
    """Seed of the random subspaces in which spectra of long filters are computed."""

    def check(self) -> None:
        """Refuses values that are wrong for every run."""
        size = self.state_size
        if size != "auto":
            require(size >= 2 and size % 2 == 0, "state_size", size, "even and at least 2, or 'auto'")
        require_at_least(0, self, "max_loss_increase", "max_filter_error")
        require(0 <= self.seed < 2**32, "seed", self.seed, "in [0, 2**32)")
        require_at_least(1, self, "batch_size")
        require_free("output", self.output)

    def run(self, arguments: Sequence[str]) -> int:
        """Distils a run; returns exit code 1 if no state size stays within the bound."""
        start_jax(note)
        keep_freed_memory()
        try:
            distill(self, table_console(), ["hyena-jax", *arguments])
        except BrokenPipeError:
            return 0 if (self.output / "distillation.json").exists() else unread()
        except NoSizeHolds as error:
            return fail(error, 1)
        return 0


def distill(settings: Distill, console: "Console", command: Sequence[str] = ()) -> None:
    """Distils a run as the settings say, prints the results and writes the new run folder.

    Args:
      command: the command line, to be recorded.

    Raises:
      UserError: if the settings are wrong or the run cannot be distilled; then nothing is written.
      NoSizeHolds: if state size `auto` finds no size; then nothing is written.
      OSError: if the folder cannot be written.
    """
    from hyena_jax.distillation import outcome, sizes, store
    from hyena_jax.files import new_folder
    from hyena_jax.output import bar

    settings.check()
    source = _load(settings, console.print)
    chosen_sizes = _sizes(settings, source.max_len)
    console.print(f"distilling {settings.workdir}, step {source.step}")
    n_parts = 1 + len(source.filters) * (1 + len(chosen_sizes)) + len(chosen_sizes)
    with bar("distilling", n_parts, console) as advance:
        before = sizes.evaluate_source(source, settings.batch_size)
        advance()
        spectra = sizes.all_spectra(source, max(chosen_sizes), settings.seed, advance)
        tried: list[Tried] = []
        for size in chosen_sizes:
            tried.append(sizes.distill(source, spectra, size, settings.batch_size, settings.seed, advance))
            if tried[-1].values["loss"] - before["loss"] <= settings.max_loss_increase:
                break
    found = outcome.Found(
        source, before, spectra, tried, settings.max_filter_error, settings.max_loss_increase
    )
    increase = outcome.loss_increase(found)
    holds = settings.state_size != "auto" or increase <= settings.max_loss_increase
    if holds:  # before anything is printed, which may fail
        results = {"command": " ".join(command), "workdir": str(settings.workdir)} | outcome.to_json(found)
        with new_folder(settings.output) as draft:
            store.write_run(draft, source, tried[-1])
            text = json.dumps(results, indent=2) + "\n"
            (draft / "distillation.json").write_text(text, encoding="utf-8")
            outcome.draw(found, draft / "distillation.png")
    for part in outcome.tables(found):
        console.print(part)
    if not holds:
        raise NoSizeHolds(
            f"no state size up to {tried[-1].size} keeps the loss within {settings.max_loss_increase:g} nats:"
            f" it grows by {increase:.4f}; nothing was written"
        )
    console.print(outcome.verdict(found), soft_wrap=True)
    config_file, folder = map(shlex.quote, (str(settings.output / store.CONFIG_FILE), str(settings.output)))
    console.print(f"run folder: {settings.output}   state size {tried[-1].size}", soft_wrap=True)
    more = f"train {config_file} --workdir {folder}{plugin_flags(source.experiment)}"
    console.print(f"to continue training: hyena-jax {more}", soft_wrap=True)


def _load(settings: Distill, report: Callable[[str], None]) -> "Source":
    from hyena_jax import models
    from hyena_jax.distillation.model import check_distillable, long_filters
    from hyena_jax.distillation.sizes import Source
    from hyena_jax.training.evaluate import load_data
    from hyena_jax.training.folder import read_run
    from hyena_jax.training.start import load_params

    run = read_run(settings.workdir)
    is_tokens = run.experiment.data.input_kind.is_tokens
    require(is_tokens, "workdir", str(settings.workdir), "a run on text or on other tokens")
    config = run.experiment.model
    check_distillable(config)
    _sizes(settings, config.max_len)
    step, params = load_params(run, models.build(config), settings.step, report)
    data = load_data(run, settings.path)
    about_data = read_json("workdir", settings.workdir / "data.json")
    return Source(run.experiment, step, params, data, about_data, long_filters(config, params))


def _sizes(settings: Distill, max_len: int) -> tuple[int, ...]:
    """State sizes to try, in this order."""
    if settings.state_size == "auto":
        return tuple(size for size in AUTO_SIZES if size <= max(max_len, AUTO_SIZES[0]))
    if settings.state_size > max_len:
        raise UserError(
            f"must be at most the run's max_len={max_len}, got {settings.state_size}", "state_size"
        )
    return (settings.state_size,)
