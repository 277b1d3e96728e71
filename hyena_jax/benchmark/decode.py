"""`hyena-jax bench decode`: language models that continue prompts, the prefill and the decoding loop."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from hyena_jax import models
from hyena_jax.benchmark import verify
from hyena_jax.benchmark.results import (
    Cells,
    Panel,
    Picture,
    Results,
    Row,
    cost_cells,
    curves,
    milliseconds,
    number,
)
from hyena_jax.benchmark.runner import Benchmark, Case, Size
from hyena_jax.benchmark.settings import Decode
from hyena_jax.benchmark.timing import Runnable, jit_program, time_once
from hyena_jax.config import MIXER_CONFIGS, LanguageModelConfig
from hyena_jax.data.examples import random_inputs
from hyena_jax.generation import decoding
from hyena_jax.generation.programs import Chunk, empty_state
from hyena_jax.mixers import decodes_by_state
from hyena_jax.system.chips import MIB
from hyena_jax.system.errors import UserError
from hyena_jax.system.trees import n_entries

PREFILL, ONE_TOKEN = "prefill", "step"


class DecodeBenchmark(Benchmark):
    """Every mixer that decodes by a state, at every context and batch size.

    One that cannot is refused if it was named; of `all` it is left out, with a line.
    """

    def __init__(self, settings: Decode):
        self.settings, self.methods, self.left_out = settings, [], []
        contexts, batches = sorted(settings.contexts), sorted(settings.batch)
        self.sizes = [{"context": context, "batch": batch} for context in contexts for batch in batches]
        for mixer in settings.chosen:
            config = MIXER_CONFIGS[mixer]()
            if config.causal and decodes_by_state(config):
                self.methods.append(mixer)
            elif mixer in settings.mixers:
                raise UserError(
                    "mixers must be causal and have init_state, prefill and step, which are timed;"
                    f" {mixer!r} is not such a mixer"
                )
            else:
                self.left_out.append(f"{mixer}: not causal, or without init_state, prefill and step")

    def _model(self, mixer: str, context: int) -> LanguageModelConfig:
        settings = self.settings
        return LanguageModelConfig(
            pattern=(MIXER_CONFIGS[mixer](),),
            n_layers=settings.n_layers,
            d_model=settings.d_model,
            d_ff=4 * settings.d_model,
            dtype=settings.dtype,
            max_len=context,
            vocab_size=256,
        )

    def check(self, method: str) -> bool:
        settings, config = self.settings, MIXER_CONFIGS[method]()
        has_oracle = verify.verify_mixer(method, config, settings.d_model, settings.dtype)
        small = verify.small_model(self._model(method, self.sizes[-1]["context"]))
        verify.require_small(f"decoding with {method}", verify.decoding_error(small), small.dtype)
        return has_oracle

    def build(self, method: str, size: Size) -> Case:
        """One program creates the state, which evaluates filters, and reads a prompt of context - n_new
        tokens; the other generates n_new tokens after it, as `hyena-jax generate` does."""
        context, batch, n_new = size["context"], size["batch"], self.settings.n_new
        config = self._model(method, context)
        model, prompt = models.build(config), random_inputs(config, batch, context - n_new)
        params = jax.jit(model.init)(jax.random.key(1), prompt[:1, :1])["params"]

        def prefill(params: dict, prompt: jax.Array) -> tuple[Any, jax.Array]:
            state = empty_state(model, params, batch, context)
            return model.apply({"params": params}, state, prompt, None, True, method="prefill")

        def proceed() -> list[Chunk]:
            return list(decoding.proceed(model, params, prefilled, decoding.Request(n_new)))

        prefilled = decoding.prefill(model, params, np.asarray(prompt), context=context)
        # The loop compiles as it first runs.
        compile_seconds = max(0.0, time_once(proceed) - time_once(proceed))
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(prefilled.state))
        one_token = Runnable(proceed, compile_seconds=compile_seconds, rounds=n_new)
        programs = {PREFILL: jit_program(prefill, params, prompt), ONE_TOKEN: one_token}
        return Case(programs, {"n_params": n_entries(params), "state_bytes": state_bytes})

    def cells(self, row: Row) -> Iterator[Cells]:
        prefill, step = row["passes"][PREFILL], row["passes"][ONE_TOKEN]
        yield {
            "mixer": row["method"],
            "context": f"{row['context']:,}",
            "batch": str(row["batch"]),
            "prefill ms": milliseconds(prefill),
            "ms/token": milliseconds(step),
            "tokens/s": f"{row['batch'] / step['seconds']['median']:,.0f}",  # of all sequences together
            "state MiB": f"{row['state_bytes'] / MIB:,.2f}",
            **cost_cells(prefill),
            "step compile s": number(step["compile_seconds"], ".2f"),
        }

    @staticmethod
    def picture(results: Results) -> Picture:
        settings = results["settings"]
        rows = [(f"{row['method']}, batch {row['batch']}", row["context"], row) for row in results["rows"]]
        seconds = ((name, at, row["passes"][ONE_TOKEN]["seconds"]["median"]) for name, at, row in rows)
        sizes = ((name, at, row["state_bytes"]) for name, at, row in rows)
        panels = (
            Panel("time of a token", "ms", curves(seconds, 1e-3)),
            Panel("decoding state", "MiB", curves(sizes, MIB)),
        )
        model = f"n_layers {settings['n_layers']}, d_model {settings['d_model']}, {settings['dtype']}"
        return Picture(f"Decoding: {model}", "context, tokens", panels)

    def lines(self, results: Results) -> list[str]:
        return self.left_out
