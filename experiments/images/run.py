"""Trains the variants of `images` with several seeds, on digits and on a folder of IDX files.

python experiments/images/run.py --workdir runs/images [--path FOLDER]

Writes results.json and accuracy.png. A run that is already in WORKDIR is read, not trained again.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import tyro

from hyena_jax.training.metrics import read_rows

HERE = Path(__file__).parent


def main(
    workdir: Path,
    path: str | None = None,
    out: Path = HERE,
    variants: tuple[str, ...] = ("fastmax", "fastmax_p1", "fastmax_p3", "softmax", "hyena", "gated"),
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
    path_seeds: tuple[int, ...] = (0, 1, 2),
    steps: int | None = None,
) -> None:
    """Trains what is missing, one run after the other, then writes the results.

    Args:
      workdir: the runs.
      path: folder with a pair of IDX files, for the MNIST variants; None trains on digits alone.
      out: where results.json and accuracy.png go.
      variants: of the config `images`.
      seeds: of the runs on digits.
      path_seeds: of the runs on `path`.
      steps: of every run, for a quick look in a workdir of its own; None takes the config's.
    """
    flags = [] if steps is None else ["--training.steps", str(steps)]
    plan = {"digits": ("", seeds, flags)}
    if path is not None:
        plan[Path(path).name] = ("mnist_", path_seeds, [*flags, "--data.path", path])
    results = {data: {} for data in plan}
    for data, (prefix, its_seeds, its_flags) in plan.items():
        for variant in variants:
            spec = f"images:{prefix}{variant}"
            runs = [train(spec, seed, workdir / f"{data}_{variant}_{seed}", its_flags) for seed in its_seeds]
            results[data][variant] = summary(runs)
    report = {"hardware": hardware(), "versions": versions(), "results": results}
    (out / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(results, out / "accuracy.png")


def train(spec: str, seed: int, workdir: Path, flags: list[str]) -> dict:
    """Trains one run unless its result is there; the time is that of the whole command."""
    result = workdir / "result.json"
    if result.exists():
        return json.loads(result.read_text())
    command = [sys.executable, "-m", "hyena_jax", "train", spec, "--workdir", str(workdir)]
    start = time.perf_counter()
    subprocess.run([*command, "--seed", str(seed), *flags], check=True)
    seconds = time.perf_counter() - start
    last = [row for row in read_rows(workdir / "metrics.jsonl") if "validation/loss" in row][-1]
    run = {
        "seed": seed,
        "steps": last["step"],
        "accuracy": last["validation/accuracy"],
        "loss": last["validation/loss"],
        "seconds": seconds,
    }
    result.write_text(json.dumps(run))
    return run


def summary(runs: list[dict]) -> dict:
    accuracies = [run["accuracy"] for run in runs]
    return {
        "accuracy_mean": statistics.mean(accuracies),
        "accuracy_deviation": statistics.stdev(accuracies) if len(runs) > 1 else None,
        "seconds_median": statistics.median(run["seconds"] for run in runs),
        "runs": runs,
    }


def draw(results: dict[str, dict], path: Path) -> None:
    """Accuracy of every run as a dot, the mean of a variant as a bar."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(results), 3.6), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (data, variants) in zip(panels, results.items(), strict=True):
        for i, found in enumerate(variants.values()):
            accuracies = [run["accuracy"] for run in found["runs"]]
            axes.plot([i] * len(accuracies), accuracies, "o", color="#9db4d0", markersize=5)
            axes.plot([i - 0.3, i + 0.3], 2 * [found["accuracy_mean"]], color="#c8442d", linewidth=2)
        axes.set_xticks(range(len(variants)), list(variants), rotation=30, ha="right")
        axes.set(title=data, ylabel="accuracy on held-out images")
        axes.grid(alpha=0.25, axis="y")
    figure.savefig(path, dpi=130)


def hardware() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return f"{os.cpu_count()} x {cpu}"


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy", "scikit-learn")
    }


if __name__ == "__main__":
    tyro.cli(main)
