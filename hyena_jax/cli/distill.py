"""`hyena-jax distill`: fits recurrences, measures the loss, chooses a size, prints and writes."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from hyena_jax.cli.base import OfRun, fail, note, table_console, unread
from hyena_jax.config import AtLeast, plugin_flags, read_run
from hyena_jax.system.errors import as_urls, require
from hyena_jax.system.files import read_json, require_free
from hyena_jax.system.malloc import keep_freed_memory
from hyena_jax.system.startup import start_jax

if TYPE_CHECKING:
    from rich.console import Console

    from hyena_jax.distillation.outcome import Outcome

# Sizes that `auto` tries, up to max_len: a state of max_len numbers could just as well store the inputs.
AUTO_SIZES = (4, 8, 16, 32, 64, 128, 256)
RESULTS = "distillation.json"


@dataclass(frozen=True, kw_only=True)
class Distill(OfRun):
    """Replace the long filters of a run on text by small recurrences, in a new run folder."""

    output: Path
    """Folder of the new run; must not exist, or be empty."""
    state_size: int | Literal["auto"] = "auto"
    """Real state size per channel, an even number: twice the complex modes. `auto` takes the smallest power
    of two from 4 that stays within --max-loss-increase."""
    max_loss_increase: Annotated[float, AtLeast(0)] = 0.01
    """Largest allowed increase of the validation loss in nats, by which `auto` chooses the size."""
    max_filter_error: Annotated[float, AtLeast(0)] = 0.1
    """Relative L2 error above which a filter is reported as far off."""
    path: str | None = None
    """Text file or folder to measure losses on, instead of the run's held-out data."""
    batch_size: Annotated[int, AtLeast(1)] = 64
    """Sequences evaluated at once; does not change the result."""
    seed: int = 0
    """Seed of the random subspaces in which spectra of long filters are computed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.state_size
        if size != "auto":
            require(size >= 2 and size % 2 == 0, "state_size", size, "even and at least 2, or 'auto'")
        require(0 <= self.seed < 2**32, "seed", self.seed, "in [0, 2**32)")
        require_free("output", self.output)

    def run(self, arguments: Sequence[str]) -> int:
        start_jax(note)
        keep_freed_memory()

        from hyena_jax.distillation import outcome
        from hyena_jax.system.files import new_folder

        console = table_console()
        try:
            found = self._distil(console)
            last, holds = found.last, self.state_size != "auto" or found.keeps
            if holds:  # before anything is printed, which may fail
                results = {"command": " ".join(["hyena-jax", *arguments]), "workdir": as_urls(self.workdir)}
                text = json.dumps(results | outcome.to_json(found), indent=2) + "\n"
                with new_folder(self.output) as draft:
                    outcome.write_run(draft, found)
                    (draft / RESULTS).write_text(text, encoding="utf-8")
                    outcome.draw(found, draft / "distillation.png")
            for part in outcome.tables(found):
                console.print(part)
            if not holds:
                most = (
                    f"no state size up to {last.size} keeps the loss within {self.max_loss_increase:g} nats"
                )
                return fail(f"{most}: it grows by {found.increase(last):.4f}; nothing was written", 1)
            console.print(outcome.verdict(found), soft_wrap=True)
            console.print(f"run folder: {self.output}   state size {last.size}", soft_wrap=True)
            config_file, folder = map(shlex.quote, (str(self.output / outcome.CONFIG_FILE), str(self.output)))
            more = f"train {config_file} --workdir {folder}{plugin_flags(found.original.experiment)}"
            console.print(f"to continue training: hyena-jax {more}", soft_wrap=True)
        except BrokenPipeError:
            return 0 if (self.output / RESULTS).exists() else unread()
        return 0

    def _distil(self, console: "Console") -> "Outcome":
        """The run with recurrences of each state size, up to the first within the bound."""
        from hyena_jax.api import load_run
        from hyena_jax.distillation import model
        from hyena_jax.distillation.outcome import Outcome
        from hyena_jax.system.output import bar
        from hyena_jax.training.evaluate import load_data

        experiment = read_run(self.workdir)
        is_tokens = experiment.data.input_kind.is_tokens
        require(is_tokens, "workdir", str(self.workdir), "a run on text or on other tokens")
        model.check_distillable(experiment.model)
        max_len, chosen = experiment.model.max_len, self.state_size
        if chosen != "auto":
            require(chosen <= max_len, "state_size", chosen, f"at most the run's max_len={max_len}")
        auto = [size for size in AUTO_SIZES if size <= max(max_len, AUTO_SIZES[0])]
        state_sizes = auto if chosen == "auto" else [chosen]
        run = load_run(self.workdir, self.step)
        filters = model.long_filters(experiment.model, run.params)
        data, about_data = load_data(run.folder, self.path), read_json("workdir", self.workdir / "data.json")
        original = model.Original(experiment, run.step, run.params, data, about_data, filters)
        console.print(f"distilling {self.workdir}, step {run.step}")
        n_parts = 1 + len(filters) * (1 + len(state_sizes)) + len(state_sizes)
        with bar("distilling", n_parts, console) as advance:
            before = model.evaluate(original, experiment, run.params, self.batch_size)
            spectra = []
            advance()
            for of_layer in filters:  # to twice the largest state size
                spectra.append(model.spectra(of_layer, 2 * max(state_sizes), self.seed))
                advance()
            found = Outcome(original, before, spectra, [], self.max_filter_error, self.max_loss_increase)
            for size in state_sizes:
                options = size, self.batch_size, self.seed, advance
                found.tried.append(model.distill(original, spectra, *options))
                if found.keeps:
                    break
        return found
