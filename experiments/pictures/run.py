"""Pictures of a trained Hyena: a mixing matrix next to attention's, and filters before and after training.

    hyena-jax train shakespeare_cpu:hyena --workdir runs/hyena
    hyena-jax train shakespeare_cpu:attention --workdir runs/attention
    python experiments/pictures/run.py --hyena runs/hyena --attention runs/attention

Writes mixing.png and filters.png next to this file, and facts.json about the runs.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import hyena_jax
from hyena_jax import inspect
from hyena_jax.cli.base import script_flags
from hyena_jax.system.machine import describe_machine, describe_versions
from hyena_jax.training.step import init_params

HERE = Path(__file__).parent
TEXT = "ROMEO:\nBut, soft! what light through yonder window breaks?\n"
LAYER = 1


@dataclass(frozen=True)
class Flags:
    """Draws both pictures."""

    hyena: Path
    """Run of `shakespeare_cpu:hyena`."""
    attention: Path
    """Run of `shakespeare_cpu:attention`."""
    output: Path = HERE
    """Folder of the pictures."""
    layer: int = LAYER
    """Whose mixing matrix and filters are drawn, from 0."""


def main(flags: Flags) -> None:
    runs = {"hyena": hyena_jax.load_run(flags.hyena), "attention": hyena_jax.load_run(flags.attention)}
    own, other = (strongest(run, flags.layer) for run in runs.values())
    number = flags.layer + 1
    titles = (f"Hyena, layer {number}, channel {own[0]}", f"attention, layer {number}, head {other[0]}")
    figure = inspect.draw_mixing(dict(zip(titles, (own[1], other[1]), strict=True)), list(TEXT))
    figure.savefig(flags.output / "mixing.png", dpi=100)

    run = runs["hyena"]
    seen = inspect.trace(run.model, run.params, encoded(run)).layers[flags.layer]
    initial = init_params(run.model, run.experiment.seed)
    before, after = (
        inspect.filters(seen.mixer, seen.own(params), run.experiment.model.max_len)
        for params in (initial, run.params)
    )
    lengths = {
        name: np.quantile(inspect.effective_length(h), (0.25, 0.5, 0.75)).tolist()
        for name, h in (("before", before), ("after", after))
    }
    # Channels with a window of middle length, and the longest.
    channels = (before.shape[1] // 2, 0)
    inspect.draw_filters(before, after, channels).savefig(flags.output / "filters.png", dpi=90)
    facts = {
        "layer": flags.layer,
        "channel": int(own[0]),
        "head": int(other[0]),
        "effective_lengths": lengths,
        "validation_loss": {name: validation_loss(run) for name, run in runs.items()},
        "machine": describe_machine(),
        "versions": describe_versions(),
    }
    (flags.output / "facts.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def encoded(run: hyena_jax.LoadedRun) -> np.ndarray:
    """The text as tokens [1, L]."""
    return np.asarray(run.tokenizer.encode(TEXT))[None]


def strongest(run: hyena_jax.LoadedRun, layer: int) -> tuple[int, np.ndarray]:
    """The channel or head that takes most from other tokens, and its mixing matrix [L, L]."""
    seen = inspect.trace(run.model, run.params, encoded(run)).layers[layer]
    found = inspect.mixing(seen.mixer, seen.own(run.params), seen.inputs)
    others = np.asarray(found.matrices[0]) * (1 - np.eye(len(TEXT)))
    values = np.asarray(found.values[0])  # [L, N, d]
    taken = np.square(np.einsum("nts,snd->tnd", others, values)).sum((0, 2))
    index = int(taken.argmax())
    return index, np.asarray(found.matrices[0, index])


def validation_loss(run: hyena_jax.LoadedRun) -> float:
    """The last one of the run."""
    return [row["validation/loss"] for row in run.metrics() if row.get("validation/loss") is not None][-1]


if __name__ == "__main__":
    main(script_flags(Flags))
