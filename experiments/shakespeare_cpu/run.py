"""Trains every variant of `shakespeare_cpu` and writes results.json, losses.png and curves.png.

python experiments/shakespeare_cpu/run.py --workdir DIR [--path input.txt] [--variants hyena hawk]
python experiments/shakespeare_cpu/run.py --workdir DIR [--path input.txt] --measure-time

A run that is already finished in WORKDIR is read, not trained again. Times are measured apart, one variant
after the other in one go, since a machine that also does other things would favour some: leave it alone then.
"""

import dataclasses
import json
import os
import platform
import runpy
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import tyro

from hyena_jax.config import config_files
from hyena_jax.training.metrics import read_rows

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
TOKENS_PER_STEP = 12 * 64
TIMED_STEPS = 300
SEEDS = {"hyena": 3, "hawk": 3, "attention": 3}
"""Runs of a variant; one of the others."""
VARIANTS = tuple(runpy.run_path(str(config_files()["shakespeare_cpu"]))["VARIANTS"])
NANOGPT = 1.8857
"""Validation loss of nanoGPT's CPU recipe, in nats."""


def main(
    workdir: Path,
    path: str | None = None,
    variants: tuple[str, ...] = VARIANTS,
    measure_time: bool = False,
) -> None:
    """Trains what is missing (or measures times), one run after the other, then writes the results."""
    report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"variants": {}}
    for variant in variants:
        if measure_time:
            found = {"ms_per_step": measure(variant, workdir / f"{variant}_timed", path)}
        else:
            seeds = range(SEEDS.get(variant, 1))
            found = {"runs": [train(variant, seed, workdir / f"{variant}_{seed}", path) for seed in seeds]}
            found["parameters"] = count_parameters(variant)
        report["variants"][variant] = report["variants"].get(variant, {}) | found
        report |= {"hardware": hardware(), "versions": versions()}
        RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    draw_losses(report["variants"])
    if not measure_time:
        draw_curves({variant: workdir / f"{variant}_0" for variant in ("hyena", "hawk", "attention")})


def train(variant: str, seed: int, workdir: Path, path: str | None) -> dict:
    """Validation loss and accuracy after the whole budget."""
    run(variant, workdir, path, ["--seed", str(seed)])
    last = [row for row in read_rows(workdir / "metrics.jsonl") if "validation/loss" in row][-1]
    return {
        "seed": seed,
        "steps": last["step"],
        "validation_loss": last["validation/loss"],
        "accuracy": last["validation/accuracy"],
    }


def measure(variant: str, workdir: Path, path: str | None) -> dict:
    """Milliseconds of a training step, over intervals of ten steps after the first fifty."""
    steps = str(TIMED_STEPS)
    short = ["--training.steps", steps, "--training.eval-every", steps, "--training.checkpoint-every", steps]
    run(variant, workdir, path, [*short, "--training.eval-windows", "1"])
    rows = [row for row in read_rows(workdir / "metrics.jsonl") if "train/loss" in row and row["step"] > 50]
    times = [1e3 * TOKENS_PER_STEP / row["train/tokens_per_second"] for row in rows]
    low, median, high = statistics.quantiles(times, n=4)
    return {"median": median, "quartiles": [low, high]}


def run(variant: str, workdir: Path, path: str | None, flags: list[str]) -> None:
    command = [sys.executable, "-m", "hyena_jax", "train", f"shakespeare_cpu:{variant}"]
    command += ["--workdir", str(workdir), "--logging.sample-tokens", "0", *flags]
    command += ["--data.path", path] if path else []
    subprocess.run(command, check=True)


def count_parameters(variant: str) -> int:
    import jax
    import jax.numpy as jnp

    from hyena_jax import config, models

    model = config.load(f"shakespeare_cpu:{variant}").model
    module = models.build(dataclasses.replace(model, vocab_size=65))
    params = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 64), jnp.int32))["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def draw_losses(variants: dict[str, dict]) -> None:
    """Validation loss of every variant, best first."""
    from matplotlib.figure import Figure

    means = {
        name: statistics.mean(run["validation_loss"] for run in result["runs"])
        for name, result in variants.items()
        if "runs" in result
    }
    names = sorted(means, key=means.get, reverse=True)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([means[name] for name in names], names, "o", color="#5b84b1")
    for i, name in enumerate(names):
        axes.text(means[name], i, f"  {means[name]:.3f}", va="center", fontsize=8)
    axes.axvline(NANOGPT, color="grey", linestyle="--", linewidth=1, label="nanoGPT, same budget")
    axes.set(xlabel="validation loss (nats per character)")
    axes.grid(alpha=0.25)
    axes.margins(x=0.1)  # room for the numbers
    axes.set_title("Tiny Shakespeare, CPU budget")
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(HERE / "losses.png", dpi=130)


def draw_curves(workdirs: dict[str, Path]) -> None:
    """Validation loss against the step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for variant, workdir in workdirs.items():
        rows = [row for row in read_rows(workdir / "metrics.jsonl") if "validation/loss" in row]
        if rows:
            steps, losses = zip(*((row["step"], row["validation/loss"]) for row in rows), strict=True)
            axes.plot(steps, losses, "o-", label=variant)
    axes.axhline(NANOGPT, color="grey", linestyle="--", linewidth=1, label="nanoGPT, same budget")
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
