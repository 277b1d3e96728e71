"""The cost that the training loop adds to its bare step: data, metrics, progress, saving.

python experiments/benchmarks/loop.py [--output experiments/benchmarks]

Writes loop.json. Loop and bare step take turns of a few hundred steps in one process, timed ten at a time.
"""

import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from targets import STEPS, VOCABULARY, steps

from hyena_jax import config as configs
from hyena_jax.cli.base import script_flags
from hyena_jax.system.machine import describe_machine, describe_versions
from hyena_jax.system.malloc import keep_freed_memory, restart_with_large_pages
from hyena_jax.training.metrics import read_rows
from hyena_jax.training.run import train

N_STEPS, WARM_UP = 300, 50


@dataclass(frozen=True)
class Flags:
    """Measures `shakespeare_cpu` with each mixer, and prints the ratio of medians."""

    output: Path = Path(__file__).parent
    rounds: int = 3
    mixers: tuple[str, ...] = ("hyena", "hawk")


def main(flags: Flags) -> None:
    restart_with_large_pages()
    keep_freed_memory()
    results = {}
    for name in flags.mixers:
        spec, loop, bare = f"shakespeare_cpu:{name}", [], []
        program = steps(spec)
        for _ in range(flags.rounds):
            loop += loop_times(spec)
            for _ in range((N_STEPS - WARM_UP) // STEPS):
                start = time.perf_counter()
                float(program.run()["loss"])
                bare.append(1e3 * (time.perf_counter() - start) / STEPS)
        medians = statistics.median(loop), statistics.median(bare)
        results[name] = {"loop_ms": medians[0], "bare_ms": medians[1], "ratio": medians[0] / medians[1]}
        print(
            f"{spec}: loop {medians[0]:.1f} ms a step, bare {medians[1]:.1f}, {medians[0] / medians[1]:.3f}"
        )
    report = describe_machine() | describe_versions() | {"results": results}
    (flags.output / "loop.json").write_text(json.dumps(report, indent=2) + "\n")


def loop_times(spec: str) -> list[float]:
    """Milliseconds per step of a training run on random characters, from its metrics."""
    with TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        symbols = "\n" + "".join(map(chr, range(ord("0"), ord("0") + VOCABULARY - 1)))
        text.write_text("".join(np.random.default_rng(0).choice(list(symbols), 200_000)))
        experiment = configs.load(spec)
        training = replace(experiment.training, steps=N_STEPS, eval_every=N_STEPS, eval_windows=1)
        experiment = replace(experiment, training=training, data=replace(experiment.data, path=str(text)))
        workdir = Path(folder) / "run"
        train(experiment, workdir, Console(quiet=True))
        rows = [row for row in read_rows(workdir / "metrics.jsonl") if "train/loss" in row]
    characters = experiment.data.batch_size * experiment.model.max_len
    return [1e3 * characters / row["train/tokens_per_second"] for row in rows if row["step"] > WARM_UP]


if __name__ == "__main__":
    main(script_flags(Flags))
