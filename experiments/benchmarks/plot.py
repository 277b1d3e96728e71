"""Draws plot.png again from the results.json of `hyena-jax bench operators`, without measuring.

python experiments/benchmarks/plot.py FOLDER [FOLDER ...]
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from hyena_jax.benchmark.operators import OperatorsBenchmark
from hyena_jax.benchmark.results import draw_picture
from hyena_jax.benchmark.settings import PLOT, RESULTS
from hyena_jax.cli.base import script_flags
from hyena_jax.config.flags import positional


@dataclass(frozen=True)
class Flags:
    """Draws the picture of each folder."""

    folders: tuple[Path, ...] = field(metadata=positional("FOLDER..."))


def main(flags: Flags) -> None:
    for folder in flags.folders:
        results = json.loads((folder / RESULTS).read_text())
        draw_picture(folder / PLOT, OperatorsBenchmark.picture(results), results["machine"])


if __name__ == "__main__":
    main(script_flags(Flags))
