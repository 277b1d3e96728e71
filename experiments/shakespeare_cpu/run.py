"""Trains every variant of `shakespeare_cpu` with several seeds and writes results.json and curves.png.

python experiments/shakespeare_cpu/run.py --workdir runs/shakespeare_cpu [--path input.txt]

A seed that is already trained in WORKDIR is read, not trained again.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import tyro

from hyena_jax.training.metrics import read_rows

HERE = Path(__file__).parent
TOKENS_PER_STEP = 12 * 64


def main(
    workdir: Path,
    path: str | None = None,
    variants: tuple[str, ...] = ("hyena", "attention"),
    seeds: tuple[int, ...] = (0, 1, 2),
) -> None:
    """Trains what is missing, one run after the other, then writes the results beside this file."""
    results = {}
    for variant in variants:
        runs = [train(variant, seed, workdir / f"{variant}_{seed}", path) for seed in seeds]
        losses = [run["validation_loss"] for run in runs]
        results[variant] = {
            "validation_loss_mean": statistics.mean(losses),
            "ms_per_step_median": statistics.median(run["ms_per_step_median"] for run in runs),
            "runs": runs,
        }
    report = {"hardware": hardware(), "versions": versions(), "results": results}
    (HERE / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    draw({variant: workdir / f"{variant}_{seeds[0]}" for variant in variants})


def train(variant: str, seed: int, workdir: Path, path: str | None) -> dict:
    command = [sys.executable, "-m", "hyena_jax.cli", "train", f"shakespeare_cpu:{variant}"]
    command += ["--workdir", str(workdir), "--seed", str(seed), "--logging.sample-tokens", "0"]
    command += ["--data.path", path] if path else []
    subprocess.run(command, check=True)
    rows = read_rows(workdir / "metrics.jsonl")
    speeds = [row["train/tokens_per_second"] for row in rows if "train/loss" in row]
    last = [row for row in rows if "validation/loss" in row][-1]
    return {
        "seed": seed,
        "steps": last["step"],
        "validation_loss": last["validation/loss"],
        "accuracy": last["validation/accuracy"],
        "ms_per_step_median": 1e3 * TOKENS_PER_STEP / statistics.median(speeds),
    }


def draw(workdirs: dict[str, Path]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for variant, workdir in workdirs.items():
        rows = [row for row in read_rows(workdir / "metrics.jsonl") if "validation/loss" in row]
        axes.plot(
            [row["step"] for row in rows], [row["validation/loss"] for row in rows], "o-", label=variant
        )
    axes.axhline(1.8857, color="grey", linestyle="--", linewidth=1, label="nanoGPT, same budget")
    axes.set(
        xlabel="step", ylabel="validation loss (nats per character)", title="Tiny Shakespeare, CPU budget"
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(HERE / "curves.png", dpi=130)


def hardware() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return f"{os.cpu_count()} x {cpu}"


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")
    }


if __name__ == "__main__":
    tyro.cli(main)
