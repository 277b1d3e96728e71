"""`hyena-jax eval`: the loss and metrics of a run on held-out data."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hyena_jax.cli.base import OfRun, note
from hyena_jax.config.checks import AtLeast
from hyena_jax.errors import printable, require
from hyena_jax.files import require_new_file
from hyena_jax.startup import start_jax

if TYPE_CHECKING:
    from hyena_jax.api import LoadedRun

ERROR = "error_at_"
IN_A_LINE = 10
"""Positions whose errors are printed on one line."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(OfRun):
    """Evaluate a run on all of its held-out data, or on tasks of EleutherAI's harness.

    --tasks needs the extra `eval`: pip install 'hyena_jax[eval]'.
    """

    path: str | None = None
    """Text file or folder, or folder of IDX images, to evaluate on instead of the held-out data."""
    batch_size: int = 64
    """Sequences or images evaluated at once; does not change the result."""
    output: Path | None = None
    """JSON file for the metrics, which must not exist yet."""
    tasks: tuple[str, ...] = ()
    """Names of tasks of lm-eval, or folders of YAML tasks, instead of the held-out data."""
    limit: Annotated[int | None, AtLeast(1)] = None
    """Documents of each of the --tasks; None takes all."""
    num_fewshot: Annotated[int | None, AtLeast(0)] = None
    """Examples before each document of the --tasks; None takes the task's own number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output is not None:
            require_new_file("output", self.output)
        for name in ("limit", "num_fewshot"):
            value = getattr(self, name)
            require(len(self.tasks) > 0 or value is None, name, value, "left out without --tasks")
        has_harness = not self.tasks or importlib.util.find_spec("lm_eval") is not None
        needs = "left out without the extra 'eval': pip install 'hyena_jax[eval]'"
        require(has_harness, "tasks", " ".join(self.tasks), needs)
        require(not self.tasks or self.path is None, "path", self.path, "left out with --tasks")

    def run(self, arguments: Sequence[str]) -> int:
        """Prints a table of metrics, and for a task the error at each scored position of a row."""
        start_jax(note)

        from rich.table import Table
        from rich.text import Text

        from hyena_jax import files
        from hyena_jax.api import load_run
        from hyena_jax.output import Output
        from hyena_jax.training.metrics import without_infinities

        run = load_run(self.workdir, self.step)
        if self.tasks:
            return self._run_tasks(run)
        values = run.evaluate(self.path, self.batch_size, progress=True)
        if self.output is not None:  # before anything is printed, which may fail
            about = {"workdir": str(run.workdir), "step": run.step}
            text = json.dumps({**about, **without_infinities(values)}, indent=2, allow_nan=False)
            files.write_text(self.output, text + "\n")
        table = Table("metric", "value", title=Text(printable(f"{run.workdir}, step {run.step}")), box=None)
        for name, value in values.items():
            if not name.startswith(ERROR):
                table.add_row(name, f"{value:,.6g}")
        console = Output()
        console.print(table)
        errors = {name.removeprefix(ERROR): x for name, x in values.items() if name.startswith(ERROR)}
        if errors:
            console.print("\nerror by scored position of a row, from 0:")
        for first in range(0, len(errors), IN_A_LINE):
            some = list(errors.items())[first : first + IN_A_LINE]
            console.print(
                f"{some[0][0]:>6}  {'  '.join(f'{error:.3f}' for _, error in some)}", soft_wrap=True
            )
        return 0

    def _run_tasks(self, run: "LoadedRun") -> int:
        """Prints a table of the tasks' metrics, with their standard errors."""
        from rich.table import Table
        from rich.text import Text

        from hyena_jax import files, harness
        from hyena_jax.output import Output

        found = harness.evaluate(run, self.tasks, self.limit, self.num_fewshot, self.batch_size)
        if self.output is not None:
            about = {"workdir": str(run.workdir), "step": run.step}
            files.write_text(self.output, json.dumps({**about, **found}, indent=2, default=str) + "\n")
        title = Text(printable(f"{run.workdir}, step {run.step}"))
        table = Table("task", "metric", "value", "error", title=title, box=None)
        for task, values in found["results"].items():
            for name, value in values.items():
                metric, _, variant = name.partition(",")
                if isinstance(value, float) and not metric.endswith("_stderr"):
                    error = values.get(f"{metric}_stderr,{variant}")
                    shown = f"{error:.4g}" if isinstance(error, float) else ""
                    table.add_row(task, metric, f"{value:,.6g}", shown)
        Output().print(table)
        return 0
