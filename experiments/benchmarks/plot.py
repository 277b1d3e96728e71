"""Draws plot.png again from the results.json of `hyena-jax bench operators`, without measuring.

python experiments/benchmarks/plot.py FOLDER [FOLDER ...]
"""

import json
from pathlib import Path
from typing import Annotated

import tyro

from hyena_jax.benchmark.operators import picture
from hyena_jax.benchmark.results import draw
from hyena_jax.benchmark.settings import PLOT, RESULTS


def main(folders: Annotated[tuple[Path, ...], tyro.conf.Positional]) -> None:
    """Draws the picture of each folder."""
    for folder in folders:
        draw(folder / PLOT, picture(json.loads((folder / RESULTS).read_text())))


if __name__ == "__main__":
    tyro.cli(main)
