"""`hyena-jax bench decode`: language models that continue prompts, the prefill and the decoding loop."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hyena_jax import models
from hyena_jax.benchmark import verify
from hyena_jax.benchmark.memory import fits
from hyena_jax.benchmark.results import (
    MIB,
    Cells,
    Panel,
    Picture,
    Report,
    Results,
    curves,
    describe_device,
    milliseconds,
    number,
)
from hyena_jax.benchmark.settings import Decode
from hyena_jax.benchmark.timing import Measured, Program, Timing, interleave, jit_program, measure, time_once
from hyena_jax.config import MIXER_CONFIGS, LanguageModelConfig, UserError
from hyena_jax.generation import decoding
from hyena_jax.generation.programs import Chunk, empty_state
from hyena_jax.mixers import decodes_by_state
from hyena_jax.output import bar

VOCABULARY = 256


@dataclass(frozen=True)
class DecodeRow:
    """The measurements of one mixer's model at one context and batch size."""

    method: str
    context: int
    batch: int
    n_params: int
    prefill: Measured
    """Creating the state, which evaluates filters, and reading the prompt."""
    step: Timing
    """Seconds of one token for all sequences: the time of all new tokens over their number."""
    step_compile_seconds: float
    tokens_per_second: float
    """Of all sequences together."""
    state_bytes: int


def run(settings: Decode, report: Report) -> None:
    """Checks every mixer and its decoding, and measures it at every context and batch size."""
    chosen, report.notes[:] = with_state(settings)
    n_rows = len(chosen) * len(settings.contexts) * len(settings.batch)
    with bar("measuring", len(chosen) + n_rows, report.console) as advance:
        for mixer in chosen:
            if not verify.verify_mixer(mixer, MIXER_CONFIGS[mixer](), settings.d_model, settings.dtype):
                report.notes.append(f"values not checked: {mixer} has no oracle")
            verify.verify_decoding(mixer, model_config(mixer, settings, max(settings.contexts)))
            advance()
        for row in bench_decode(settings, chosen, advance, report.notes.append):
            report.add(row, cells(row))
            report.write()
    report.finish([], picture)


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


@dataclass
class Decoder:
    """One model with its programs."""

    prefill: Program
    proceed: Callable[[], list[Chunk]]
    """Generates the new tokens after the prompt, as `hyena-jax generate` does."""
    n_params: int
    state_bytes: int


def bench_decode(
    settings: Decode, mixers: Sequence[str], advance: Callable[[], None], note: Callable[[str], None]
) -> Iterator[DecodeRow]:
    """Rows by context, batch size and mixer; the mixers of one context and batch size take turns.

    Args:
      advance: called once for each of the possible rows.
      note: called with a line for every mixer that is not measured at longer contexts.
    """
    remaining = list(mixers)
    for context in sorted(settings.contexts):
        for batch in sorted(settings.batch):
            decoders = {}
            for mixer in remaining:
                decoder = build(model_config(mixer, settings, context), context, batch, settings.n_new)
                if fits(decoder.prefill.memory.total):
                    decoders[mixer] = decoder
                else:
                    note(f"{mixer}: context {context} with batch {batch} is more than memory allows")
            for row in _measure(decoders, context, batch, settings):
                yield row
                if row.prefill.seconds.median > settings.max_seconds:
                    remaining.remove(row.method)
                    limit = f"took over {settings.max_seconds:g} s; no longer"
                    note(f"{row.method}: a prefill at {context} {limit}")
            for _ in mixers:
                advance()


def build(config: LanguageModelConfig, context: int, batch: int, n_new: int) -> Decoder:
    """The programs for prompts of context - n_new tokens."""
    model = models.build(config)
    prompt = verify.example_inputs(config, batch, context - n_new)
    params = jax.jit(model.init)(jax.random.key(1), prompt[:1, :1])["params"]

    def prefill(params: dict, prompt: jax.Array) -> tuple[Any, jax.Array]:
        state = empty_state(model, params, batch, context)
        return model.apply({"params": params}, state, prompt, None, True, method="prefill")

    def proceed() -> list[Chunk]:
        return list(decoding.proceed(model, params, prefilled, decoding.Request(n_new)))

    prefilled = decoding.prefill(model, params, np.asarray(prompt), context=context)
    return Decoder(
        prefill=jit_program(prefill, params, prompt),
        proceed=proceed,
        n_params=sum(leaf.size for leaf in jax.tree.leaves(params)),
        state_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(prefilled.state)),
    )


def _measure(decoders: dict[str, Decoder], context: int, batch: int, settings: Decode) -> list[DecodeRow]:
    prefills = measure({name: decoder.prefill for name, decoder in decoders.items()}, settings)
    first = {name: time_once(decoder.proceed) for name, decoder in decoders.items()}
    runs = {name: decoder.proceed for name, decoder in decoders.items()}
    rows = []
    for name, whole in interleave(runs, settings.seconds, settings.least_runs).items():
        n_new = settings.n_new
        step = Timing(
            whole.median / n_new, whole.lower / n_new, whole.upper / n_new, whole.mean / n_new, whole.runs
        )
        row = DecodeRow(
            method=name,
            context=context,
            batch=batch,
            n_params=decoders[name].n_params,
            prefill=prefills[name],
            step=step,
            step_compile_seconds=max(0.0, first[name] - whole.median),
            tokens_per_second=batch / step.median,
            state_bytes=decoders[name].state_bytes,
        )
        rows.append(row)
    return rows


def cells(row: DecodeRow) -> Iterator[Cells]:
    """The line of a mixer, context and batch size."""
    yield {
        "mixer": row.method,
        "context": f"{row.context:,}",
        "batch": str(row.batch),
        "prefill ms": milliseconds(row.prefill.seconds),
        "ms/token": milliseconds(row.step),
        "tokens/s": f"{row.tokens_per_second:,.0f}",
        "state MiB": f"{row.state_bytes / MIB:,.2f}",
        "MiB planned": number(row.prefill.compiled_bytes, ",.1f", MIB),
        "compile s": f"{row.prefill.compile_seconds + row.step_compile_seconds:.1f}",
    }


def picture(results: Results) -> Picture:
    """Time of a token and bytes of the state, of each mixer and batch size, by context."""
    settings = results["settings"]
    rows = [(f"{row['method']}, batch {row['batch']}", row["context"], row) for row in results["rows"]]
    seconds = ((name, context, row["step"]["median"]) for name, context, row in rows)
    sizes = ((name, context, row["state_bytes"]) for name, context, row in rows)
    panels = (
        Panel("time of a token", "ms", curves(seconds, 1e-3)),
        Panel("decoding state", "MiB", curves(sizes, MIB)),
    )
    model = f"n_layers {settings['n_layers']}, d_model {settings['d_model']}, {settings['dtype']}"
    return Picture(f"Decoding: {model}; {describe_device(results)}", "context, tokens", panels)
