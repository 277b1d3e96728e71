"""Trains the variants of `images` with several seeds, on digits and on a folder of IDX files.

python experiments/images/run.py [--workdir runs/images] [--path FOLDER]
python experiments/images/run.py --plot-only    # accuracy.png from results.json

Writes results.json and accuracy.png. Runs that are finished in WORKDIR are read, not repeated.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import hyena_jax, measured_on, report

from hyena_jax.cli.base import script_flags
from hyena_jax.sweeps.figure import COLOURS
from hyena_jax.training.metrics import read_rows

HERE = Path(__file__).parent
ATTENTION = ("fastmax", "fastmax_p1", "fastmax_p3", "softmax")
D_FF = {
    "": {**dict.fromkeys(ATTENTION, 112), "hyena": 74, "gated": 60},
    "mnist_": {**dict.fromkeys(ATTENTION, 110), "hyena": 57, "gated": 24},
}
"""Widths of the hidden layer with which all variants have as many parameters as `gated`, within 0.3%."""
MESSAGE = "At equal parameters Hyena and gated convolutions lead on MNIST; on digits all are close"


@dataclass(frozen=True)
class Flags:
    """Trains what is missing, one run after the other, then writes the results."""

    workdir: Path = Path("runs/images")
    """Folder of the runs."""
    path: str | None = None
    """Folder with a pair of IDX files, for the MNIST variants; None trains on digits alone."""
    out: Path = HERE
    """Folder of results.json and accuracy.png."""
    variants: tuple[str, ...] = tuple(D_FF[""])
    """Variants of the config `images`."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of the runs on digits."""
    path_seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs on `path`."""
    steps: int | None = None
    """Steps of every run, for a quick look in another workdir; None takes the config's."""
    plot_only: bool = False
    """Draw accuracy.png from results.json, and train nothing."""


def main(flags: Flags) -> None:
    settings = [] if flags.steps is None else ["--training.steps", str(flags.steps)]
    plan = {"digits": ("", flags.seeds, settings)}
    if flags.path is not None:
        plan[Path(flags.path).name] = ("mnist_", flags.path_seeds, [*settings, "--data.path", flags.path])

    def measure() -> Iterator[dict]:
        results = {data: {} for data in plan}
        for data, (prefix, its_seeds, its_flags) in plan.items():
            for variant in flags.variants:
                width = D_FF[prefix][variant]
                spec, start = f"images:{prefix}{variant}", f"{data}_{variant}_{width}"
                wide = ["--model.d-ff", str(width), *its_flags]
                runs = [train(spec, seed, flags.workdir / f"{start}_{seed}", wide) for seed in its_seeds]
                results[data][variant] = summary(runs)
        yield {**measured_on("scikit-learn"), "results": results}

    report(
        flags.out, measure, lambda found: draw(found["results"], flags.out / "accuracy.png"), flags.plot_only
    )


def train(spec: str, seed: int, workdir: Path, flags: list[str]) -> dict:
    """Trains one run unless its result exists; `seconds` is the time of the whole command."""
    result = workdir / "result.json"
    if result.exists():
        return json.loads(result.read_text())
    start = time.perf_counter()
    hyena_jax("train", spec, "--workdir", str(workdir), "--seed", str(seed), *flags)
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
        "seconds_median": statistics.median(run["seconds"] for run in runs),
        "runs": runs,
    }


def draw(results: dict[str, dict], path: Path) -> None:
    """Accuracy of every run as a dot, and the mean over seeds as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(results), 4), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
    for axes, (data, variants) in zip(panels, results.items(), strict=True):
        for i, found in enumerate(variants.values()):
            accuracies, mean = [run["accuracy"] for run in found["runs"]], found["accuracy_mean"]
            axes.plot([i - 0.3, i + 0.3], [mean, mean], color=COLOURS[0], linewidth=2)
            # Next to each other, since equal ones would hide each other.
            beside = [i + 0.06 * (k - (len(accuracies) - 1) / 2) for k in range(len(accuracies))]
            axes.plot(beside, accuracies, "o", color=COLOURS[1], markersize=4)
        axes.set_xticks(range(len(variants)), list(variants), rotation=30, ha="right")
        axes.set(title=f"{data}, {len(found['runs'])} seeds", ylabel="accuracy on held-out images")
        axes.grid(alpha=0.25, axis="y")
    figure.suptitle(f"{MESSAGE}\ndots: seeds; lines: means", fontsize="medium")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(script_flags(Flags))
