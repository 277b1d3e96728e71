"""`hyena-jax eval`: the loss and metrics of a run on held-out data."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hyena_jax.cli.base import OfRun, note
from hyena_jax.config.checks import AtLeast
from hyena_jax.system.errors import UserError, as_printed, as_urls, require
from hyena_jax.system.files import require_new_file
from hyena_jax.system.startup import start_jax

ERROR = "error_at_"
IN_A_LINE = 10
"""Positions whose errors are printed on one line."""


@dataclass(frozen=True, kw_only=True)
class EvaluateRun(OfRun):
    """Evaluate a run on all of its held-out data, or on tasks of EleutherAI's harness.

    --tasks needs the extra `eval`: pip install 'hyena_jax[eval]'.
    """

    path: str | None = None
    """Text file or folder, or folder of IDX images, to evaluate on instead of the held-out data."""
    batch_size: Annotated[int, AtLeast(1)] = 64
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
        if self.tasks and importlib.util.find_spec("lm_eval") is None:
            raise UserError("needs the extra 'eval': pip install 'hyena_jax[eval]'", "tasks")
        require(not self.tasks or self.path is None, "path", self.path, "left out with --tasks")

    def run(self, arguments: Sequence[str]) -> int:
        start_jax(note)

        from rich.table import Table
        from rich.text import Text

        from hyena_jax.api import load_run
        from hyena_jax.system import files
        from hyena_jax.system.output import Output
        from hyena_jax.training.metrics import without_infinities

        run = load_run(self.workdir, self.step)
        if self.tasks:
            from hyena_jax.scoring import harness

            values = harness.evaluate(run, self.tasks, self.limit, self.num_fewshot, self.batch_size)
        else:
            values = run.evaluate(self.path, self.batch_size, progress=True)
        if self.output is not None:  # before anything is printed, which may fail
            about = {"workdir": as_urls(run.workdir), "step": run.step, **without_infinities(values)}
            files.write_text(self.output, json.dumps(about, indent=2, default=str) + "\n", is_new=True)
        console, title = Output(), Text(as_printed(f"{run.workdir}, step {run.step}"))
        if self.tasks:
            table = Table("task", "metric", "value", "error", title=title, box=None)
            for task, found in values["results"].items():
                for name, value in found.items():
                    metric, _, variant = name.partition(",")
                    if isinstance(value, float) and not metric.endswith("_stderr"):
                        error = found.get(f"{metric}_stderr,{variant}")
                        shown = f"{error:.4g}" if isinstance(error, float) else ""
                        table.add_row(task, metric, f"{value:,.6g}", shown)
            console.print(table)
            return 0
        table = Table("metric", "value", title=title, box=None)
        for name, value in values.items():
            if not name.startswith(ERROR):
                table.add_row(name, f"{value:,.6g}")
        console.print(table)
        errors = {name.removeprefix(ERROR): x for name, x in values.items() if name.startswith(ERROR)}
        if errors:
            console.print("\nerror by scored position of a row, from 0:")
        for first in range(0, len(errors), IN_A_LINE):
            some = list(errors.items())[first : first + IN_A_LINE]
            shown = "  ".join(f"{error:.3f}" for _, error in some)
            console.print(f"{some[0][0]:>6}  {shown}", soft_wrap=True)
        return 0
