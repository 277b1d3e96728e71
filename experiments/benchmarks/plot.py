"""Draws plot.png again from the results.json of `hyena-jax bench operators`, without measuring.

python experiments/benchmarks/plot.py FOLDER [FOLDER ...]
"""

import json
from pathlib import Path
from typing import Annotated

import tyro

from hyena_jax.benchmark.operators import OperatorsBenchmark
from hyena_jax.benchmark.results import draw_picture
from hyena_jax.benchmark.settings import PLOT, RESULTS


def main(folders: Annotated[tuple[Path, ...], tyro.conf.Positional]) -> None:
    """Draws the picture of each folder."""
    for folder in folders:
        results = json.loads((folder / RESULTS).read_text())
        draw_picture(folder / PLOT, OperatorsBenchmark.picture(results), results["machine"])


if __name__ == "__main__":
    tyro.cli(main)
