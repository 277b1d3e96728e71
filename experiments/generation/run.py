"""What whole generations cost: by recomputing the context, lazily, online (tiles), and with constant states.

python experiments/generation/run.py [--output experiments/generation] [--longest 65536]

Writes results.json and plot.png. Every model has 4 layers of 128 channels; L tokens are drawn after a prompt
of one. Each whole generation runs twice and the second counts. What would take longer than --most-seconds is
timed on its first pieces (recomputation: at 20 positions) and marked as extrapolated: the time of a token
does not depend on its position there.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.progress import track

from hyena_jax import models
from hyena_jax.benchmark.machine import describe_machine, describe_versions
from hyena_jax.config import HawkConfig, HyenaConfig, LanguageModelConfig, MixerConfig, ModalFilterConfig
from hyena_jax.generation.decoding import Request, generate
from hyena_jax.generation.sampling import SamplingRule
from hyena_jax.startup import keep_freed_memory

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
    """Seconds of a whole generation of `length` tokens, or of its first pieces, times what is left."""
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
    """The same by the parallel form over the whole context for every token; one program for all positions."""
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
    """One line of the results."""
    return {"length": length, "batch": batch, "seconds": seconds, "extrapolated": extrapolated}


METHODS: dict[str, Callable[[int, int, float], dict]] = {
    "recomputed": lambda length, batch, _: recomputation(HyenaConfig(), length, batch),
    "lazy": lambda length, batch, most: generation(HyenaConfig(), length, batch, most, lazy=True),
    "online": lambda length, batch, most: generation(HyenaConfig(), length, batch, most),
    "distilled": lambda length, batch, most: generation(DISTILLED, length, batch, most),
    "hawk": lambda length, batch, most: generation(HawkConfig(), length, batch, most),
}


def exponent(rows: list[dict]) -> float:
    """e of seconds = c length^e, fitted from LEAST_FITTED tokens up."""
    points = [(math.log(r["length"]), math.log(r["seconds"])) for r in rows if r["length"] >= LEAST_FITTED]
    return float(np.polyfit(*zip(*points, strict=True), 1)[0])


def main(
    output: Path = Path(__file__).parent,
    longest: int = 65_536,
    batched: int = 16_384,
    most_seconds: float = 40,
) -> None:
    """Measures every method at powers of four, and a batch of 8 at one length."""
    keep_freed_memory()
    lengths = [length for length in (256, 1024, 4096, 16_384, 65_536) if length <= longest]
    cases = [(length, 1) for length in lengths] + [(batched, 8)] * (batched <= longest)
    results: dict[str, list[dict]] = {name: [] for name in METHODS}
    for length, batch in track(cases, description="generating"):
        for name, method in METHODS.items():
            row = method(length, batch, most_seconds)
            results[name].append(row)
            mark = " (extrapolated)" if row["extrapolated"] else ""
            print(f"{name:>10} L={length:6d} B={batch} {row['seconds']:10.2f} s{mark}", flush=True)
            jax.clear_caches()
    single = {name: [row for row in rows if row["batch"] == 1] for name, rows in results.items()}
    exponents = {name: exponent(rows) for name, rows in single.items() if len(rows) > 2}
    report = {"command": " ".join(["python", *sys.argv]), **describe_machine()}
    report |= describe_versions(with_torch=False) | {"exponents": exponents, "results": results}
    (output / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(output / "plot.png", single, exponents)


def draw(path: Path, results: dict[str, list[dict]], exponents: dict[str, float]) -> None:
    """Seconds against length; what was extrapolated is hollow."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for i, (name, rows) in enumerate(results.items()):
        label = f"{name}, L^{exponents[name]:.2f}" if name in exponents else name
        lengths, seconds = ([row[key] for row in rows] for key in ("length", "seconds"))
        axes.plot(lengths, seconds, color=f"C{i}", label=label)
        faces = ["white" if row["extrapolated"] else f"C{i}" for row in rows]
        axes.scatter(lengths, seconds, color=faces, edgecolors=f"C{i}", zorder=3)
    axes.set(xscale="log", yscale="log", xlabel="tokens generated", ylabel="seconds for all of them")
    axes.set_xscale("log", base=2)
    axes.set_title("Whole generations: 4 layers of 128 channels, batch 1 (hollow: extrapolated)")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    tyro.cli(main)
