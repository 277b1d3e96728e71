"""The output of a sweep: the planned time, a line for each run that ends, and the time left over all runs."""

import statistics
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console

from hyena_jax.system.output import VALUES, Bar

if TYPE_CHECKING:
    from hyena_jax.sweeps.sweep import Outcome


MOST = 1e9
"""Seconds, more than any sweep takes."""


class SweepProgress(Bar):
    """A bar over all runs with the time left; without a terminal, only the line of each run."""

    def __init__(
        self, console: Console, outcomes: "Mapping[str, Outcome]", todo: Sequence[str], n_workers: int
    ):
        super().__init__(console, "", len(outcomes), VALUES, transient=True)
        self._n_workers = n_workers
        self._n_runs, self._n_ended = len(outcomes), len(outcomes) - len(todo)
        # Of the runs that have not ended: the planned seconds, and the part that is done.
        self._planned = {name: outcomes[name].planned for name in todo}
        self._steps = {name: outcomes[name].experiment.training.steps for name in todo}
        self._parts = {name: min(1.0, outcomes[name].step / self._steps[name]) for name in todo}
        # How much longer than planned the runs took that have ended.
        self._ratios: list[float] = []
        steps = sum(round(self._steps[name] * (1 - part)) for name, part in self._parts.items())
        done = f", {self._n_ended} of {self._n_runs} are done" if self._n_ended else ""
        planned = self._planned_left() or "unknown"
        about = f"{len(todo)} runs to train{done}; {steps:,} steps; planned time {planned}"
        console.print(about, soft_wrap=True)

    def __enter__(self) -> "SweepProgress":
        self._show_runs()
        return super().__enter__()

    def step(self, name: str, step: int) -> None:
        """A run has reached `step`."""
        self._parts[name] = step / self._steps[name]
        self._show_runs()

    def ended(self, name: str, outcome: "Outcome") -> None:
        """A run has ended, however it did, or was stopped: prints its line."""
        planned = self._planned.pop(name)
        del self._parts[name]
        if outcome.status == "waiting":
            self._console.print(f"stopped  {name}   step {outcome.step}", soft_wrap=True)
            return
        self._n_ended += 1
        if planned and outcome.status == "done" and outcome.step == self._steps[name]:
            self._ratios.append(outcome.seconds / planned)
        result = outcome.status
        if outcome.error is not None:
            result = f"{outcome.status}: {outcome.error}"
        elif outcome.values is not None:
            known = {key: value for key, value in outcome.values.items() if value is not None}
            shown = [key for key in known if key == "loss" or key.endswith("accuracy")][:2]
            result = "   ".join(f"{key.replace('_', ' ')} {known[key]:.4f}" for key in shown)
        left = self._planned_left()
        more = f"   {left} left" if left and self._parts else ""
        duration = timedelta(seconds=round(outcome.seconds))
        line = f"{self._n_ended}/{self._n_runs}  {name}   step {outcome.step}   {result}   {duration}{more}"
        self._console.print(line, soft_wrap=True)
        self._show_runs()

    def _planned_left(self) -> str:
        """The planned time of what is left, at the pace of the runs that have ended; empty if unknown."""
        known = [seconds for seconds in self._planned.values() if seconds is not None]
        if not known:
            return ""
        usual, pace = statistics.mean(known), statistics.median(self._ratios or [1.0])
        free_at = [0.0] * self._n_workers
        for name, part in self._parts.items():  # each goes to the worker that is free first
            planned = self._planned[name]
            free_at[free_at.index(min(free_at))] += (usual if planned is None else planned) * (1 - part)
        return str(timedelta(seconds=round(min(pace * max(free_at), MOST))))

    def _show_runs(self) -> None:
        done, left = self._n_ended + sum(self._parts.values()), self._planned_left()
        self.show(done, f"{self._n_ended}/{self._n_runs} runs", values=left and f"{left} left")
