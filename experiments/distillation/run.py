"""Trains Hyena on Tiny Shakespeare, distils it to several sizes, and writes results.json and plot.png.

python experiments/distillation/run.py --workdir DIR [--path input.txt] [--lengths 64] [--sizes 8 32]

The model is `shakespeare_cpu:hyena` (4 layers, width 128, 2,000 steps of 12 windows) with its context 64,
and 256. What is finished in WORKDIR is read, not done again.
"""

import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import tyro

from hyena_jax.benchmark.machine import describe_machine

HERE = Path(__file__).parent
BOUND = 0.02
"""Nats by which the loss of order 32 should grow at most."""


def main(
    workdir: Path,
    path: str | None = None,
    lengths: tuple[int, ...] = (64, 256),
    sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64),
) -> None:
    """Trains and distils what is missing, then writes the results."""
    report = {"hardware": describe_machine(), "versions": versions(), "runs": []}
    for length in lengths:
        run = workdir / f"shakespeare_{length}"
        data = ["--data.path", path] if path else []
        context = ["--model.max-len", str(length), "--data.seq-len", str(length)]
        if not (run / "learning_curves.png").exists():
            command("train", "shakespeare_cpu:hyena", "--workdir", str(run), *context, *data)
        for size in sizes:
            folder = workdir / f"distilled_{length}_{size}"
            if not folder.exists():
                command("distill", str(run), "--output", str(folder), "--state-size", str(size))
            found = json.loads((folder / "distillation.json").read_text())
            report["runs"].append({"max_len": length, **found["tried"][0], "before": found["before"]["loss"]})
    (HERE / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(report["runs"])


def command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "hyena_jax", *arguments], check=True)


def draw(runs: list[dict]) -> None:
    """Growth of the loss, KL and worst filter error against the state size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    loss, kl, error = figure.subplots(1, 3)
    for length in dict.fromkeys(run["max_len"] for run in runs):
        ours = [run for run in runs if run["max_len"] == length]
        sizes = [run["state_size"] for run in ours]
        loss.plot(sizes, [run["loss_increase"] for run in ours], "o-", label=f"context {length}")
        kl.plot(sizes, [run["kl"] for run in ours], "o-")
        worst = [max(filters["error"] for filters in run["filters"]) for run in ours]
        error.plot(sizes, worst, "o-")
    loss.axhline(BOUND, color="grey", linestyle="--", linewidth=1)
    loss.set(title="Growth of the validation loss (nats)")
    loss.legend(frameon=False)
    kl.set(title="KL(run || distilled), nats a token", yscale="log")
    error.set(title="Relative L2 error, worst layer", yscale="log")
    for axes in (loss, kl, error):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="state size")
        axes.grid(alpha=0.25)
    figure.savefig(HERE / "plot.png", dpi=130)


def versions() -> dict[str, str]:
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


if __name__ == "__main__":
    tyro.cli(main)
