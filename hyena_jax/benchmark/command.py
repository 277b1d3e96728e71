"""`hyena-jax bench operators | model | decode`: check against oracles, measure, print, write."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hyena_jax.benchmark.settings import Decode, Model, Operators, Settings

if TYPE_CHECKING:
    from rich.console import Console


def run(settings: Settings, console: "Console", command: Sequence[str] = ()) -> None:
    """Measures what the settings ask for; prints and keeps each row as soon as it is measured.

    Args:
      command: the command line, for the record.

    Raises:
      UserError: for settings that cannot be run; nothing has been measured then.
      Mismatch: if something differs from its oracle; nothing has been printed then.
      OSError: if the files cannot be written; the folder is tried before anything is measured.
    """
    settings.check()
    # PyTorch's idle threads would otherwise spin for more work, and slow down whatever runs next.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from hyena_jax.benchmark import decode, model, operators
    from hyena_jax.benchmark.report import Report

    report = Report(settings, console, command)
    match settings:
        case Operators():
            operators.run(settings, report)
        case Model():
            model.run(settings, report)
        case Decode():
            decode.run(settings, report)
