"""Tokens per second and state of every mixer, by the context length that the state is allocated for.

python experiments/generation/tokens.py [--output experiments/generation]

Writes tokens.json and prints the table. Every model has 4 layers of 128 channels and reads a prompt of one
token; it then generates 512 tokens once to compile, and three times more, whose median counts. A step's cost
depends only on the allocated length, except for online convolutions, whose larger tiles come later: run.py
times whole contexts.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from rich.progress import track
from run import build

from hyena_jax.cli.base import script_flags
from hyena_jax.config import MIXER_CONFIGS
from hyena_jax.generation.decoding import Request, prefill, proceed
from hyena_jax.generation.sampling import SamplingRule
from hyena_jax.sweeps.compare import state_size
from hyena_jax.system.machine import describe_machine, describe_versions
from hyena_jax.system.malloc import keep_freed_memory, restart_with_large_pages

N_TOKENS = 512
N_RUNS = 3
MIB = 2**20


def measure(name: str, context: int) -> dict:
    """The speed of one sequence, a median after a run that compiles; and its state."""
    model, params = build(MIXER_CONFIGS[name](), context)
    prompted = prefill(model, params, [np.array([1])])
    request = Request(N_TOKENS, SamplingRule(greedy=True))
    seconds = []
    for _ in range(1 + N_RUNS):
        start = time.perf_counter()
        for _ in proceed(model, params, prompted, request):
            pass
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[1:])
    return {"tokens_per_second": N_TOKENS / median, "state_bytes": state_size(model.config)}


@dataclass(frozen=True)
class Flags:
    """Measures every mixer at every context, and writes tokens.json after each mixer."""

    output: Path = Path(__file__).parent
    contexts: tuple[int, ...] = (1024, 4096, 16_384)


def main(flags: Flags) -> None:
    restart_with_large_pages()
    keep_freed_memory()
    report = {"command": " ".join(["python", *sys.argv]), **describe_machine()}
    report |= describe_versions() | {"mixers": {}}
    for name in track(MIXER_CONFIGS, description="generating"):
        row = report["mixers"][name] = {}
        for context in flags.contexts:
            row[context] = measure(name, context)
            jax.clear_caches()
        speeds = [f"{value['tokens_per_second']:,.0f}" for value in row.values()]
        states = [f"{value['state_bytes'] / MIB:.3g}" for value in row.values()]
        print("| " + " | ".join([f"`{name}`", *speeds, *states]) + " |", flush=True)
        (flags.output / "tokens.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(script_flags(Flags))
