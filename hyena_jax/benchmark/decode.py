"""`hyena-jax bench decode`: language models that continue prompts, the prefill and the decoding loop."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from hyena_jax import models
from hyena_jax.benchmark import verify
from hyena_jax.benchmark.results import (
    MIB,
    Cells,
    Panel,
    Picture,
    Results,
    curves,
    describe_device,
    milliseconds,
    number,
)
from hyena_jax.benchmark.runner import Benchmark, Case, Measurement, Size, cost_cells
from hyena_jax.benchmark.settings import Decode
from hyena_jax.benchmark.timing import Program, jit_program, time_once
from hyena_jax.config import MIXER_CONFIGS, LanguageModelConfig
from hyena_jax.generation import decoding
from hyena_jax.generation.programs import Chunk, empty_state
from hyena_jax.mixers import decodes_by_state
from hyena_jax.system.errors import UserError

PREFILL, STEP = "prefill", "step"
VOCABULARY = 256


def make(settings: Decode) -> Benchmark:
    """Every mixer that decodes by a state, at every context and batch size."""
    chosen, notes = with_state(settings)
    contexts, batches = sorted(settings.contexts), sorted(settings.batch)

    def check(mixer: str) -> bool:
        config = model_config(mixer, settings, contexts[-1])
        has_oracle = verify.verify_mixer(mixer, MIXER_CONFIGS[mixer](), settings.d_model, settings.dtype)
        verify.verify_decoding(mixer, config)
        return has_oracle

    return Benchmark(
        methods=chosen,
        sizes=[{"context": context, "batch": batch} for context in contexts for batch in batches],
        check=check,
        build=lambda mixer, size: build(model_config(mixer, settings, size["context"]), size, settings.n_new),
        cells=cells,
        picture=picture,
        lines=lambda _: notes,
    )


def model_config(mixer: str, settings: Decode, context: int) -> LanguageModelConfig:
    """The language model of one mixer, as the settings ask for it."""
    return LanguageModelConfig(
        pattern=(MIXER_CONFIGS[mixer](),),
        n_layers=settings.n_layers,
        d_model=settings.d_model,
        d_ff=4 * settings.d_model,
        dtype=settings.dtype,
        max_len=context,
        vocab_size=VOCABULARY,
    )


def with_state(settings: Decode) -> tuple[list[str], list[str]]:
    """The mixers that can be timed, and a note for each other mixer that `all` includes.

    Raises:
      UserError: if a mixer that is named explicitly cannot be timed.
    """
    able, notes = [], []
    for mixer in settings.chosen:
        config = MIXER_CONFIGS[mixer]()
        if config.causal and decodes_by_state(config):
            able.append(mixer)
        elif mixer in settings.mixers:
            raise UserError(
                "mixers must be causal and have init_state, prefill and step, which are timed;"
                f" {mixer!r} is not such a mixer"
            )
        else:
            notes.append(f"{mixer}: not causal, or without init_state, prefill and step")
    return able, notes


def build(config: LanguageModelConfig, size: Size, n_new: int) -> Case:
    """The programs for prompts of context - n_new tokens: creating the state, which evaluates filters, and
    reading the prompt; and generating n_new tokens after it, as `hyena-jax generate` does."""
    model, context, batch = models.build(config), size["context"], size["batch"]
    prompt = verify.example_inputs(config, batch, context - n_new)
    params = jax.jit(model.init)(jax.random.key(1), prompt[:1, :1])["params"]

    def prefill(params: dict, prompt: jax.Array) -> tuple[Any, jax.Array]:
        state = empty_state(model, params, batch, context)
        return model.apply({"params": params}, state, prompt, None, True, method="prefill")

    def proceed() -> list[Chunk]:
        return list(decoding.proceed(model, params, prefilled, decoding.Request(n_new)))

    prefilled = decoding.prefill(model, params, np.asarray(prompt), context=context)
    # The loop compiles as it first runs.
    compile_seconds = max(0.0, time_once(proceed) - time_once(proceed))
    facts = {
        "n_params": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(prefilled.state)),
    }
    step = Program(proceed, compile_seconds=compile_seconds, rounds=n_new)
    return Case({PREFILL: jit_program(prefill, params, prompt), STEP: step}, facts)


def cells(row: Measurement) -> Iterator[Cells]:
    """The line of a mixer, context and batch size."""
    prefill, step = row.passes[PREFILL], row.passes[STEP]
    yield {
        "mixer": row.method,
        "context": f"{row.size['context']:,}",
        "batch": str(row.size["batch"]),
        "prefill ms": milliseconds(prefill.seconds),
        "ms/token": milliseconds(step.seconds),
        "tokens/s": f"{row.size['batch'] / step.seconds.median:,.0f}",  # of all sequences together
        "state MiB": f"{row.facts['state_bytes'] / MIB:,.2f}",
        **cost_cells(prefill),
        "step compile s": number(step.compile_seconds, ".2f"),
    }


def picture(results: Results) -> Picture:
    """Time of a token and bytes of the state, of each mixer and batch size, by context."""
    settings = results["settings"]
    rows = [(f"{row['method']}, batch {row['batch']}", row["context"], row) for row in results["rows"]]
    seconds = ((name, context, row["passes"][STEP]["seconds"]["median"]) for name, context, row in rows)
    sizes = ((name, context, row["state_bytes"]) for name, context, row in rows)
    panels = (
        Panel("time of a token", "ms", curves(seconds, 1e-3)),
        Panel("decoding state", "MiB", curves(sizes, MIB)),
    )
    model = f"n_layers {settings['n_layers']}, d_model {settings['d_model']}, {settings['dtype']}"
    return Picture(f"Decoding: {model}; {describe_device(results)}", "context, tokens", panels)
