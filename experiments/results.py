"""The loop that experiments share which are not studies: measure, write results.json, draw from it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hyena_jax.files import write_text


def report(
    folder: Path,
    measure: Callable[[], Iterable[dict[str, Any]]],
    draw: Callable[[dict[str, Any]], None],
    plot_only: bool,
) -> None:
    """Writes `folder/results.json` whenever `measure` yields results, which grow; then draws the last.

    Args:
      plot_only: draw what the file holds, and measure nothing.
    """
    path = folder / "results.json"
    if not plot_only:
        folder.mkdir(parents=True, exist_ok=True)  # before minutes of measuring
        for results in measure():
            write_text(path, json.dumps(results, indent=2) + "\n")
    draw(json.loads(path.read_text()))


def measured_on(*packages: str) -> dict[str, Any]:
    """This machine, and the versions of JAX and of further packages."""
    from hyena_jax.benchmark.machine import describe_machine, describe_versions  # starts JAX

    return {"hardware": describe_machine(), "versions": describe_versions(*packages)}


def hyena_jax(*arguments: str) -> None:
    """Runs a command line in its own process."""
    subprocess.run([sys.executable, "-m", "hyena_jax", *arguments], check=True)
