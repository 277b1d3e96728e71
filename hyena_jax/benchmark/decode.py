"""Language models token by token: the prefill of a prompt, then single steps. Axes: B batch, V vocabulary."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from hyena_jax import models
from hyena_jax.benchmark.memory import fits
from hyena_jax.benchmark.programs import Effort, Measured, Program, jit_program, measure
from hyena_jax.benchmark.settings import Decode
from hyena_jax.benchmark.timing import Timing, compile_program, interleave
from hyena_jax.benchmark.verify import example_inputs
from hyena_jax.config import MIXER_CONFIGS, LanguageModelConfig

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
    """Seconds of one token for all rows."""
    step_compile_seconds: float
    tokens_per_second: float
    """Of all rows together, by the mean step: some algorithms do more at some steps."""
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


@dataclass
class Decoder:
    """One model with its programs, and the state that its steps go on from."""

    prefill: Program
    step: Callable[[Any, jax.Array], tuple[Any, jax.Array]]
    step_compile_seconds: float
    token: jax.Array
    n_params: int
    state: Any = None

    def start(self) -> None:
        """Reads the prompt again."""
        self.state = self.prefill.run()[0]

    def run_step(self) -> jax.Array:
        """Logits [B, V] after one more token."""
        self.state, logits = self.step(self.state, self.token)
        return logits


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
    """The two programs for prompts of context - n_new tokens."""
    model = models.build(config)
    prompt = example_inputs(config, batch, context - n_new)
    params = jax.jit(model.init)(jax.random.key(1), prompt[:1, :1])["params"]

    def prefill(params: dict, prompt: jax.Array) -> tuple[Any, jax.Array]:
        bound = model.bind({"params": params})
        state, logits = bound.prefill(bound.init_state(batch, context), prompt)
        return state, logits[:, -1]

    def step(state: Any, params: dict, token: jax.Array) -> tuple[Any, jax.Array]:
        return model.apply({"params": params}, state, token, method="step")

    token = prompt[:, 0]
    state = jax.eval_shape(prefill, params, prompt)[0]
    # Donated, or every step would copy the whole state.
    compiled = compile_program(step, state, params, token, donate=(0,))
    n_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    return Decoder(
        prefill=jit_program(prefill, params, prompt),
        step=lambda state, token: compiled.executable(state, params, token),
        step_compile_seconds=compiled.seconds,
        token=token,
        n_params=n_params,
    )


def _measure(
    decoders: dict[str, Decoder], context: int, batch: int, n_new: int, effort: Effort
) -> list[DecodeRow]:
    prefills = measure({name: decoder.prefill for name, decoder in decoders.items()}, effort)
    for decoder in decoders.values():
        decoder.start()
        jax.block_until_ready(decoder.run_step())  # the warm-up
    # All the steps that the context has room for, and no more.
    steps = interleave({name: decoder.run_step for name, decoder in decoders.items()}, 0.0, n_new - 1)
    return [
        DecodeRow(
            method=name,
            context=context,
            batch=batch,
            n_params=decoder.n_params,
            prefill=prefills[name],
            step=steps[name],
            step_compile_seconds=decoder.step_compile_seconds,
            tokens_per_second=batch / steps[name].mean,
            state_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(decoder.state)),
        )
        for name, decoder in decoders.items()
    ]
