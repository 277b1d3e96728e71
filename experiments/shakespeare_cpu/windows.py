"""Losses of a run on the held-out text, all of it and on the windows of irhum/hyena's published loss.

python experiments/shakespeare_cpu/windows.py runs/shakespeare_published [--step best] [--keep published]

The published loss is a mean over 1,024 windows of 256 characters: four batches of 256, whose starts are drawn
from `PRNGKey(0)` as in the published notebook. What a key draws depends on `jax_threefry_partitionable`,
which was False by default when the notebook was run, and is True today. --keep
writes a run's losses to larger.json, from which `run.py --plot-only` draws larger.png.
"""

import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import faults_in_a_line

import hyena_jax
from hyena_jax.cli.base import script_flags
from hyena_jax.config.flags import positional
from hyena_jax.sweeps.compare import n_params
from hyena_jax.system.files import write_text
from hyena_jax.system.machine import describe_machine, describe_versions
from hyena_jax.training.metrics import read_rows

KEPT = Path(__file__).parent / "larger.json"

SEQ_LEN, BATCHES, BATCH_SIZE = 256, 4, 256


@dataclass(frozen=True)
class Flags:
    """Prints both losses of a run."""

    run: Path = field(metadata=positional("RUN"))
    """Folder of a run on Tiny Shakespeare by characters."""
    step: str = "best"
    """The run's checkpoint: `best`, `latest` or a number."""
    keep: str | None = None
    """Also write the losses, with those of the run's evaluations, to larger.json under this name."""


def main(flags: Flags) -> None:
    with faults_in_a_line():
        loaded = hyena_jax.load_run(flags.run, flags.step)
    whole, on_windows = loaded.evaluate()["loss"], loss_on_windows(loaded)
    print(f"step {loaded.step}   held-out text {whole:.4f}   published windows {on_windows:.4f}")
    if flags.keep is not None:
        found = {"step": loaded.step, "held_out": whole, "published_windows": on_windows}
        kept = json.loads(KEPT.read_text()) | {flags.keep: {"best": found, **course(loaded, flags.run)}}
        write_text(KEPT, json.dumps(kept, indent=1) + "\n")


def starts(n_tokens: int, partitionable: bool = False) -> np.ndarray:
    """First tokens [1024] of the published windows of a held-out text of n_tokens."""
    found, key = [], jax.random.PRNGKey(0)
    with jax.threefry_partitionable(partitionable):
        for _ in range(BATCHES):
            key, _ = jax.random.split(key)
            n_starts = n_tokens - SEQ_LEN - 1
            found.append(jax.random.choice(key, n_starts, (BATCH_SIZE,), replace=False))
    return np.concatenate(found)


def loss_on_windows(run: hyena_jax.LoadedRun) -> float:
    """The mean loss of the published windows, in nats."""

    @jax.jit
    def losses(windows: jax.Array) -> jax.Array:
        logits = run.model.apply({"params": run.params}, windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])

    held_out = run.data.held_out
    windows = held_out[starts(len(held_out))[:, None] + np.arange(SEQ_LEN + 1)].astype(np.int32)
    return float(np.mean([losses(part) for part in np.split(windows, 16)], dtype=np.float64))


def course(run: hyena_jax.LoadedRun, folder: Path) -> dict[str, Any]:
    """Size, hardware, time of a step, and the evaluations of a run that this machine trained."""
    rows = read_rows(folder / "metrics.jsonl")
    trained = {row["step"]: row for row in rows if "train/loss" in row}
    tokens = run.experiment.data.batch_size * run.experiment.data.seq_len
    seconds = [tokens / row["train/tokens_per_second"] for row in trained.values()]
    return {
        "parameters": n_params(run.experiment.model),
        "hardware": describe_machine(),
        "versions": describe_versions(),
        "median_seconds_per_step": statistics.median(seconds),
        "evaluations": [
            {
                "step": row["step"],
                "loss": row["validation/loss"],
                "accuracy": row["validation/accuracy"],
                "train_loss": trained[row["step"]]["train/loss"],
            }
            for row in rows
            if "validation/loss" in row
        ],
    }


if __name__ == "__main__":
    main(script_flags(Flags))
