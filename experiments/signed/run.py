"""Recurrences whose factors may be negative beside the same without, on language, at equal state.

python experiments/signed/run.py --shakespeare input.txt --wikitext wiki.test.tokens [--jobs 2]
python experiments/signed/run.py --plot-only    # the page and the figure from results.json

Started again, it continues.
"""

import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from protocol import SEARCH_SEED, best_rate, search, trained, with_rate
from results import measured_on, report
from study import FAULTS, describe

import hyena_jax
from hyena_jax.comparison.figure import COLOURS, save
from hyena_jax.comparison.table import KIB, markdown, n_params, state_size
from hyena_jax.config import Experiment, read_run
from hyena_jax.files import write_text

HERE = Path(__file__).parent
MODELS = {
    "hawk": ("hawk", []),
    "signed_hawk": ("signed_hawk", []),
    "gated_delta": ("gated_delta", []),
    "signed_gated_delta": ("gated_delta", ["--model.pattern.0.negative-eigenvalues"]),
}
"""The variants of `shakespeare_cpu`, and their flags."""
MIXERS = ("hawk", "gated_delta")
SEEDS = (0, 1, 2)


def main(
    shakespeare: str | None = None,
    wikitext: str | None = None,
    workdir: Path = Path("runs/signed"),
    jobs: int = 1,
    plot_only: bool = False,
) -> None:
    """Searches each model's learning rate on Shakespeare, then trains three seeds on both texts.

    Args:
      shakespeare: file of Tiny Shakespeare.
      wikitext: file of WikiText-2's test text.
      workdir: folder of the runs.
      jobs: runs that are trained at the same time.
      plot_only: draw and write from results.json, and train nothing.
    """
    texts = {"Tiny Shakespeare": shakespeare, "WikiText-2": wikitext}
    if not plot_only and None in texts.values():
        sys.exit("error: give the files of both texts, --shakespeare and --wikitext")

    def measure() -> Iterator[dict[str, Any]]:
        own = {model: make_run(model, SEARCH_SEED, shakespeare) for model in MODELS}
        found, _ = search(own, lambda values: values["loss"], workdir / "search", jobs)
        best = {
            model: best_rate(losses, own[model].optimizer.learning_rate) for model, losses in found.items()
        }
        searched = {
            model: {f"{rate:g}": loss for rate, loss in sorted(losses.items()) if loss is not None}
            for model, losses in found.items()
        }
        results = measured_on() | {"rates": searched, "runs": {}}
        for text, path in texts.items():
            runs = {
                f"model={model},seed={seed}": with_rate(make_run(model, seed, path), best[model])
                for model in MODELS
                for seed in SEEDS
            }
            outcomes = trained(runs, workdir / text, jobs)
            results["runs"][text] = {name: outcome.values["loss"] for name, outcome in outcomes.items()}
        model_of = {model: read_run(outcomes[f"model={model},seed=0"].workdir).model for model in MODELS}
        results["parameters"] = {model: n_params(found) for model, found in model_of.items()}
        results["state_bytes"] = {model: state_size(found) for model, found in model_of.items()}
        yield results

    try:
        report(HERE, measure, write, plot_only)
    except FAULTS as error:
        sys.exit(describe(error))


def make_run(model: str, seed: int, path: str) -> Experiment:
    """A run of a model at the config's own learning rate."""
    variant, flags = MODELS[model]
    flags = ["--data.path", path, "--logging.sample-tokens", "0", *flags]
    return next(iter(hyena_jax.make_runs(f"shakespeare_cpu:{variant}", {"seed": [seed]}, flags).values()))


def seeds_of(runs: Mapping[str, float], model: str) -> list[float]:
    """The losses of a model's seeds on a text."""
    return [runs[f"model={model},seed={seed}"] for seed in SEEDS]


def gain(runs: Mapping[str, float], mixer: str) -> str:
    """How much lower the signed form ends: of means, and the least and the most over pairs of seeds."""
    plain, signed = seeds_of(runs, mixer), seeds_of(runs, f"signed_{mixer}")
    mean = statistics.fmean(plain) - statistics.fmean(signed)
    return f"{mean:.3f} ({min(plain) - max(signed):.3f} to {max(plain) - min(signed):.3f})"


def gains(results: Mapping[str, Any]) -> str:
    """The table of how much lower the signed forms end, on each text."""
    rows = [(f"`{mixer}`", [gain(runs, mixer) for runs in results["runs"].values()]) for mixer in MIXERS]
    return "\n".join(markdown("signed", [*results["runs"]], rows))


def write(results: Mapping[str, Any]) -> None:
    """Writes the figure and the page."""
    draw(results["runs"])
    write_text(HERE / "README.md", page(results))


def draw(texts: Mapping[str, Mapping[str, float]]) -> None:
    """The loss of every seed, a panel for each text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6), layout="constrained")
    panels = figure.subplots(1, len(texts), sharey=True)
    for axes, (text, runs) in zip(panels, texts.items(), strict=True):
        for i, model in enumerate(MODELS):
            losses, colour = seeds_of(runs, model), COLOURS[i % 2]
            axes.plot(losses, [i] * len(losses), "o", color=colour, markersize=5)
            axes.plot(statistics.fmean(losses), i, "|", color=colour, markersize=22)
        axes.set(title=text, yticks=range(len(MODELS)), yticklabels=[*MODELS])
        axes.set_xlabel("validation loss, nats per character   (line: mean)")
        axes.grid(alpha=0.25)
        axes.margins(y=0.2)
    panels[0].invert_yaxis()
    save(figure, HERE / "plot.png", dpi=130)


def page(results: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    machine, versions = results["hardware"], results["versions"]
    rows = []
    for model in MODELS:
        rates = results["rates"][model]
        cells = [f"{results['parameters'][model]:,}", f"{results['state_bytes'][model] / KIB:.1f}"]
        cells += [f"{min(rates, key=rates.get)} of {', '.join(rates)}"]
        for runs in results["runs"].values():
            losses = seeds_of(runs, model)
            cells.append(f"{statistics.fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})")
        rows.append((f"`{model}`", cells))
    columns = ("parameters", "state, KiB", "rate", *results["runs"])
    table = "\n".join(markdown("model", columns, rows))
    return f"""# Signed recurrences on language

Recurrences whose factors may be negative have learned parity, and those whose factors lie in (0, 1) have not
([parity](../state_tracking/README.md)). Does the sign cost anything on language, or does it help there too?
On Tiny Shakespeare at one learning rate the signed Hawk ended 0.03 nats lower than Hawk, at the same state
([all mixers](../shakespeare_cpu/README.md)). That could have been the rate, or the text. So here each model
has the best of at least three learning rates, found on Shakespeare with a seed of its own; and there is a
second text, for which no rate was chosen, and a second family of recurrences.

```bash
python experiments/signed/run.py --shakespeare input.txt --wikitext wiki.test.tokens --jobs 2
```

`signed_hawk` is Hawk with `sign` gate, `signed_gated_delta` the gated delta rule with `negative_eigenvalues`.
The models, and 2,000 steps of 768 characters, are those of `shakespeare_cpu`; the last tenth of a text is
held out. Losses in nats per character: mean and range of seeds 0, 1, 2; the state is that of all four
layers. {machine["device"]}, {machine["cores"]} cores, Python {versions["python"]}, JAX {versions["jax"]},
float32. The command writes this page.

{table}

By how much the signed form is lower: of means, and the least and the most between any two seeds:

{gains(results)}

![Validation loss of each seed](plot.png)

{FINDINGS}
"""


FINDINGS = """Every seed of the signed Hawk is below every seed of Hawk, on both texts. The rate was a part of
the first difference: at 0.0063 Hawk ends 0.01 lower than at 0.002, where that comparison had been made. The
text was none: on WikiText-2, for which no rate was chosen, the difference is as large. The signed form has
256 parameters more, and the same state.

For the gated delta rule the data are weaker. On WikiText-2 every signed seed is below every other. On
Shakespeare they overlap, and the rate may be all of it: one seed chose 0.0063 for the plain form by a hair
(1.638 against 1.641 at 0.002), while three seeds at 0.002 end at 1.633 on the page of all mixers, as the
signed form does here. Larger models, longer contexts and longer training were not tried."""


if __name__ == "__main__":
    tyro.cli(main)
