"""Language models that continue prompts: the prefill, then the decoding loop. Axes: B batch, V vocabulary."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hyena_jax import models
from hyena_jax.benchmark.memory import fits
from hyena_jax.benchmark.programs import Effort, Measured, Program, jit_program, measure
from hyena_jax.benchmark.settings import Decode
from hyena_jax.benchmark.timing import Timing, interleave, time_once
from hyena_jax.benchmark.verify import example_inputs
from hyena_jax.config import MIXER_CONFIGS, LanguageModelConfig, UserError
from hyena_jax.generation import decoding
from hyena_jax.generation.programs import Chunk, empty_state
from hyena_jax.mixers import decodes_by_state

VOCABULARY = 256


@dataclass(frozen=True)
class DecodeRow:
    """What was measured of one mixer's model at one context and batch size."""

    method: str
    context: int
    batch: int
    n_params: int
    prefill: Measured
    """The initial state, in which filters are evaluated, and the prompt."""
    step: Timing
    """Seconds of one token for all rows: those of all new tokens by their number."""
    step_compile_seconds: float
    tokens_per_second: float
    """Of all rows together."""
    state_bytes: int


def model_config(mixer: str, settings: Decode, context: int) -> LanguageModelConfig:
    """The language model of one mixer that the settings ask for."""
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
    """The mixers that can be timed, and a note for each that `all` names and cannot.

    Raises:
      UserError: if a mixer cannot that is named by itself.
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
    """Draws the new tokens after the prompt, as `hyena-jax generate` does."""
    n_params: int
    state_bytes: int


def bench_decode(
    settings: Decode,
    mixers: Sequence[str],
    effort: Effort,
    advance: Callable[[], None],
    note: Callable[[str], None],
) -> Iterator[DecodeRow]:
    """Rows by context, batch size and mixer; the mixers of one context and batch size take turns.

    Args:
      advance: called once for each of the possible rows.
      note: called with a line for every mixer that goes no further.
    """
    remaining = list(mixers)
    for context in sorted(settings.contexts):
        for batch in sorted(settings.batch):
            decoders = {}
            for mixer in list(remaining):
                decoder = build(model_config(mixer, settings, context), context, batch, settings.n_new)
                if fits(decoder.prefill.memory.total):
                    decoders[mixer] = decoder
                else:
                    note(f"{mixer}: context {context} with batch {batch} is more than memory allows")
            rows = _measure(decoders, context, batch, settings.n_new, effort)
            yield from rows
            prefills = {row.method: row.prefill.seconds.median for row in rows}
            for mixer in decoders:
                if mixer in remaining and prefills[mixer] > effort.max_seconds:
                    remaining.remove(mixer)
                    note(f"{mixer}: a prefill at {context} took over {effort.max_seconds:g} s; no longer")
            for _ in mixers:
                advance()


def build(config: LanguageModelConfig, context: int, batch: int, n_new: int) -> Decoder:
    """The programs for prompts of context - n_new tokens."""
    model = models.build(config)
    prompt = example_inputs(config, batch, context - n_new)
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


def _measure(
    decoders: dict[str, Decoder], context: int, batch: int, n_new: int, effort: Effort
) -> list[DecodeRow]:
    prefills = measure({name: decoder.prefill for name, decoder in decoders.items()}, effort)
    first = {name: time_once(decoder.proceed) for name, decoder in decoders.items()}
    runs = {name: decoder.proceed for name, decoder in decoders.items()}
    whole = interleave(runs, effort.budget, effort.least_runs)
    rows = []
    for name, decoder in decoders.items():
        step = Timing(*(value / n_new for value in whole[name][:4]), whole[name].runs)
        row = DecodeRow(
            method=name,
            context=context,
            batch=batch,
            n_params=decoder.n_params,
            prefill=prefills[name],
            step=step,
            step_compile_seconds=max(0.0, first[name] - whole[name].median),
            tokens_per_second=batch / step.median,
            state_bytes=decoder.state_bytes,
        )
        rows.append(row)
    return rows
