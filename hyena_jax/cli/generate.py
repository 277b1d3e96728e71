"""`hyena-jax generate`: its flags and its output."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hyena_jax.cli.base import OfRun, note
from hyena_jax.config import UserError, require
from hyena_jax.files import require_new_file
from hyena_jax.startup import start_jax

if TYPE_CHECKING:
    import numpy as np

    from hyena_jax.data.tokenizers import Tokenizer
    from hyena_jax.generation.decoding import Continuation, Prefilled, Request
    from hyena_jax.generation.programs import Chunk
    from hyena_jax.generation.sampling import SamplingRule
    from hyena_jax.training.folder import RunFolder


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

    def run(self, arguments: Sequence[str]) -> int:
        """Prints the continuations; a single one is printed while it is generated."""
        start_jax(note)

        from hyena_jax import models
        from hyena_jax.data.tokenizers import is_tokenizer
        from hyena_jax.generation.decoding import continuations, generate, proceed
        from hyena_jax.generation.prompts import encode, encode_prompt
        from hyena_jax.generation.recomputation import note_recomputation
        from hyena_jax.generation.sample import stream
        from hyena_jax.generation.sampling import SamplingRule
        from hyena_jax.output import bar
        from hyena_jax.training.folder import read_run
        from hyena_jax.training.start import load_params

        _check_files(self)
        rule = SamplingRule(self.greedy, self.temperature, self.top_k, self.top_p, self.min_p)
        run = read_run(self.workdir)
        is_text = run.experiment.data.input_kind.is_tokens and is_tokenizer(run.encoding)
        must = "a run on text, or on tokens with a tokenizer"
        require(is_text, "workdir", str(self.workdir), must)
        request = _request(self, rule, run.encoding)
        if self.load_state is None:
            prompts = [encode_prompt(run.encoding, prompt) for prompt in self.prompt]
        else:  # they go on where others ended
            prompts = [encode(run.encoding, prompt, "prompt") for prompt in self.prompt]
        model = models.build(run.experiment.model)
        _, params = load_params(run, model, self.step, note)
        note_recomputation(model, note)
        if self.load_state is None and self.save_state is None:
            shown, chunks = prompts, generate(model, params, prompts, request)
        else:
            prefilled = _read(self, run, model, params, prompts)
            shown, chunks = prefilled.read, proceed(model, params, prefilled, request)
        if len(shown) * request.n_samples == 1 and self.output is None:
            stream(run.encoding, shown[0], chunks)
            return 0
        with bar("generating", request.n_tokens) as advance:
            rows = continuations(_counted(chunks, advance)) or [None] * len(shown) * request.n_samples
        if self.output is not None:  # before anything is printed, which may fail
            _write(self.output, run.encoding, shown, rows, request.n_samples)
        _show(run.encoding, shown, rows, request.n_samples)
        return 0


def _counted(chunks: "Iterator[Chunk]", advance: Callable[[int], None]) -> "Iterator[Chunk]":
    for chunk in chunks:
        advance(chunk.tokens.shape[1])
        yield chunk


def _check_files(command: Generate) -> None:
    if not command.prompt and command.load_state is None:
        raise UserError(
            "must be given, as --prompt TEXT, or a state to continue from, as --load-state FILE", "prompt"
        )
    for name in ("output", "save_state"):
        path = getattr(command, name)
        if path is not None:
            require_new_file(name, path)
    if command.output is not None and command.save_state is not None:
        differ = command.output.resolve() != command.save_state.resolve()
        require(differ, "output", str(command.output), "another file than --save-state")


def _request(command: Generate, rule: "SamplingRule", tokenizer: "Tokenizer") -> "Request":
    from hyena_jax.generation.decoding import Request
    from hyena_jax.generation.stopping import stops

    n_rows = max(1, len(command.prompt)) * command.num_samples
    require(n_rows <= MAX_ROWS, "num_samples", command.num_samples, f"at most {MAX_ROWS} over all prompts")
    texts = [re.sub(r"\\([nt\\])", lambda found: ESCAPES[found[1]], text) for text in command.stop]
    stop_tokens, stop_texts = stops(tokenizer, texts)
    return Request(
        n_tokens=command.max_new_tokens,
        rule=rule,
        seed=command.seed,
        n_samples=command.num_samples,
        stop_tokens=stop_tokens,
        stop_texts=stop_texts,
        n_symbols=tokenizer.vocab_size,
        on_full=command.on_full,
    )


def _read(
    command: Generate, run: "RunFolder", model: object, params: dict, prompts: "list[np.ndarray]"
) -> "Prefilled":
    """The state after the prompts, which continue --load-state if given; written to --save-state if given."""
    from hyena_jax.generation import saved_state
    from hyena_jax.generation.decoding import prefill

    origin = saved_state.origin(run.experiment.model, params)
    before = None
    if command.load_state is not None:
        before = saved_state.load(command.load_state, model, params, origin)
        n_prompts = len(before.read)
        most = f"at most {MAX_ROWS // n_prompts} for the {n_prompts} prompts of the state"
        fits = n_prompts * command.num_samples <= MAX_ROWS
        require(fits, "num_samples", command.num_samples, most)
    reads = before is None or len(prompts) > 0
    prefilled = prefill(model, params, prompts, before) if reads else before
    if command.save_state is not None:
        saved_state.save(command.save_state, prefilled, origin)
    return prefilled


def _show(
    tokenizer: "Tokenizer",
    prompts: "Sequence[np.ndarray]",
    rows: "Sequence[Continuation | None]",
    n_samples: int,
) -> None:
    for i, row in enumerate(rows):
        prompt = prompts[i // n_samples]
        name = f"sample {i % n_samples + 1}"
        if len(prompts) > 1:
            name = f"prompt {i // n_samples + 1}" + (f", {name}" if n_samples > 1 else "")
        print(f"--- {name}\n{tokenizer.decode([*prompt, *(row.tokens if row else ())])}")


def _write(
    path: Path,
    tokenizer: "Tokenizer",
    prompts: "Sequence[np.ndarray]",
    rows: "Sequence[Continuation | None]",
    n_samples: int,
) -> None:
    from hyena_jax import files
    from hyena_jax.data.tokenizers import decode_after

    lines = []
    for i, row in enumerate(rows):
        tokens = [] if row is None else row.tokens.tolist()
        line = {
            "prompt": tokenizer.decode(prompts[i // n_samples]),
            "sample": i % n_samples + 1,
            "text": decode_after(tokenizer, prompts[i // n_samples], tokens),
            "tokens": tokens,
            "log_probs": [] if row is None else [round(float(p), 6) for p in row.log_probs],
        }
        lines.append(json.dumps(line, ensure_ascii=False))
    files.write_text(path, "\n".join(lines) + "\n")
