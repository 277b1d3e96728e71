"""`hyena-jax generate`: its flags and its output."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hyena_jax.cli.base import OfRun, note
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import require_new_file
from hyena_jax.system.startup import start_jax

if TYPE_CHECKING:
    import numpy as np

    from hyena_jax.api import LoadedRun
    from hyena_jax.data.tokenizers import Tokenizer
    from hyena_jax.generation.decoding import Continuation, Prefilled

# Most continuations at once: they are computed together and printed when all are done.
MAX_ROWS = 4096
# Escapes in --stop, which shells pass on as two characters.
ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


@dataclass(frozen=True, kw_only=True)
class Generate(OfRun):
    """Continue prompts with a run's model."""

    prompt: tuple[str, ...] = ()
    """Texts to continue; several are continued together."""
    max_new_tokens: int = 256
    """Most tokens to generate."""
    temperature: float = 1.0
    """Divide the logits by this."""
    top_k: int | None = None
    """Sample only from the k most probable tokens."""
    top_p: float | None = None
    """Sample only from the fewest most probable tokens whose probabilities sum to at least p."""
    min_p: float | None = None
    """Sample only from tokens with at least p times the highest probability."""
    greedy: bool = False
    """Always take the most probable token."""
    stop: tuple[str, ...] = ()
    """Texts after which a continuation ends. \\n is a newline, \\t a tab, \\\\ a backslash."""
    seed: int = 0
    """Seed of the sampling; sample i uses seed + i."""
    num_samples: int = 1
    """Continuations of each prompt."""
    on_full: Literal["slide", "error"] = "slide"
    """When the context is full: `slide` rereads its newer half and continues; `error` refuses beforehand."""
    output: Path | None = None
    """New file for the continuations with tokens and log-probabilities, one JSON object per line."""
    save_state: Path | None = None
    """New file for the model's state after the prompts, before sampling."""
    load_state: Path | None = None
    """File from --save-state to continue from, without rereading its prompts; --prompt adds to them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompt and self.load_state is None:
            flags = "as --prompt TEXT, or a state to continue from, as --load-state FILE"
            raise UserError(f"must be given, {flags}", "prompt")
        for name in ("output", "save_state"):
            path = getattr(self, name)
            if path is not None:
                require_new_file(name, path)
        if self.output is not None and self.save_state is not None:
            differ = self.output.resolve() != self.save_state.resolve()
            require(differ, "output", str(self.output), "another file than --save-state")
        n_rows = max(1, len(self.prompt)) * self.num_samples
        require(n_rows <= MAX_ROWS, "num_samples", self.num_samples, f"at most {MAX_ROWS} over all prompts")

    def run(self, arguments: Sequence[str]) -> int:
        """Prints the continuations; a single one is printed while it is generated."""
        start_jax(note)

        from hyena_jax.api import load_run
        from hyena_jax.generation.decoding import continuations, generate, proceed
        from hyena_jax.generation.prompts import encode
        from hyena_jax.generation.sample import stream
        from hyena_jax.generation.sampling import SamplingRule
        from hyena_jax.system.output import bar

        rule = SamplingRule(self.greedy, self.temperature, self.top_k, self.top_p, self.min_p)
        run = load_run(self.workdir, self.step)
        stop = [re.sub(r"\\([nt\\])", lambda found: ESCAPES[found[1]], text) for text in self.stop]
        request = run.request(self.max_new_tokens, rule, stop, self.seed, self.num_samples, self.on_full)
        if self.load_state is None and self.save_state is None:
            read = [encode(run.tokenizer, prompt, "prompt", at_start=True) for prompt in self.prompt]
            chunks = generate(run.decoder, run.params, read, request)
        else:
            prefilled = self._prefilled(run)
            read, chunks = prefilled.read, proceed(run.decoder, run.params, prefilled, request)
        if len(read) * self.num_samples == 1 and self.output is None:
            stream(run.tokenizer, read[0], chunks)
            return 0
        drawn = []
        with bar("generating", request.n_tokens) as advance:
            for chunk in chunks:
                drawn.append(chunk)
                advance(chunk.tokens.shape[1])
        rows = continuations(drawn)
        starts = [prompt for prompt in read for _ in range(self.num_samples)]
        rows = rows or [None] * len(starts)
        if self.output is not None:  # before anything is printed, which may fail
            self._write(run.tokenizer, starts, rows)
        for i, (start, row) in enumerate(zip(starts, rows, strict=True)):
            name = f"sample {i % self.num_samples + 1}"
            if len(read) > 1:
                name = f"prompt {i // self.num_samples + 1}" + (f", {name}" if self.num_samples > 1 else "")
            print(f"--- {name}\n{run.tokenizer.decode([*start, *(row.tokens if row else ())])}")
        return 0

    def _prefilled(self, run: "LoadedRun") -> "Prefilled":
        """The state after the prompts, which continue --load-state; written to --save-state, if given."""
        from hyena_jax.generation import saved_state
        from hyena_jax.generation.decoding import prefill
        from hyena_jax.generation.prompts import encode

        origin, is_new = saved_state.origin(run.experiment.model, run.params), self.load_state is None
        prompts = [encode(run.tokenizer, prompt, "prompt", at_start=is_new) for prompt in self.prompt]
        if is_new:
            prefilled = prefill(run.decoder, run.params, prompts)
        else:  # prompts go on where others ended
            prefilled = saved_state.load_state(self.load_state, run.decoder, run.params, origin)
            count = len(prefilled.read)
            most = f"at most {MAX_ROWS // count} for the {count} prompts of the state"
            require(count * self.num_samples <= MAX_ROWS, "num_samples", self.num_samples, most)
            if prompts:
                prefilled = prefill(run.decoder, run.params, prompts, prefilled)
        if self.save_state is not None:
            saved_state.save_state(self.save_state, prefilled, origin)
        return prefilled

    def _write(
        self, tokenizer: "Tokenizer", starts: "Sequence[np.ndarray]", rows: "Sequence[Continuation | None]"
    ) -> None:
        from hyena_jax.data.tokenizers import decode_after
        from hyena_jax.system import files

        lines = []
        for i, (start, row) in enumerate(zip(starts, rows, strict=True)):
            tokens = [] if row is None else row.tokens.tolist()
            line = {
                "prompt": tokenizer.decode(start),
                "sample": i % self.num_samples + 1,
                "text": decode_after(tokenizer, start, tokens),
                "tokens": tokens,
                "log_probs": [] if row is None else [round(float(p), 6) for p in row.log_probs],
            }
            lines.append(json.dumps(line, ensure_ascii=False))
        files.write_text(self.output, "\n".join(lines) + "\n", is_new=True)
