"""The loop that continues prompts. The host only counts; `programs.py` holds what the device runs.

Axes: P prompts, R rows (each prompt's samples, one after the other), T tokens of the longest prompt, C tokens
of a chunk, V vocabulary.

A prompt is read at once (`prefill`); then a program draws up to `TILE` tokens per call without the host, and
after each `TILE` tokens long convolutions absorb a finished tile (`hyena_jax.ops.online_conv`). Any causal
model with logits [B, L, V] of tokens int [B, L] will do; if it or one of its mixers has no decoding state, it
recomputes its context for every token (`programs.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hyena_jax import models
from hyena_jax.config import ModelConfig
from hyena_jax.config.checks import MAX_COUNT
from hyena_jax.generation import programs
from hyena_jax.generation.programs import Chunk, Cursor, SamplingConfig, SamplingInputs
from hyena_jax.generation.prompts import OnFull, StopTexts, check_prompts, cut, right_aligned
from hyena_jax.generation.sampling import SamplingRule
from hyena_jax.mixers.online import has_tiles
from hyena_jax.ops.online_conv import TILE, due_size
from hyena_jax.system.errors import choose, require


@dataclass(frozen=True)
class Request:
    """How many tokens to draw, how, and when to stop."""

    n_tokens: int
    """Most new tokens per row."""
    rule: SamplingRule = field(default=SamplingRule())
    """How each token is drawn."""
    seed: int = 0
    """Sample i of every prompt uses seed + i, independently of the other rows."""
    n_samples: int = 1
    """Samples of each prompt, which is read once."""
    stop_tokens: tuple[int, ...] = ()
    """A row ends after any of these ids."""
    stop_texts: StopTexts | None = None
    """A row ends after any of these texts. They are searched after each chunk, so up to TILE - 1 more tokens
    are drawn and dropped."""
    n_symbols: int | None = None
    """Ids to draw from, if the model's vocabulary is larger than the tokenizer's; None draws from all."""
    lazy: bool = False
    """Compute long convolutions from the whole history at every token: the reference for tiles."""
    on_full: OnFull = "slide"
    """If max_len tokens were read and the state has no room left: `slide` rereads their newer half as a new
    context; `error` refuses beforehand. A state that does not grow continues. All rows slide at once, when
    the longest is full, so that a shorter one then keeps fewer tokens than it would alone."""


class Prefilled(NamedTuple):
    """A model that has read prompts: its state, the logits [P, V] of the next token, the tokens read, and how
    many more the state has room for; None if it does not grow."""

    state: Any
    logits: jax.Array
    read: tuple[np.ndarray, ...]
    room: int | None


class Continuation(NamedTuple):
    """The tokens drawn for one row, int32 [n], and their log-probabilities, float32 [n]."""

    tokens: np.ndarray
    log_probs: np.ndarray


def generate(
    model: nn.Module, params: optax.Params, prompts: Sequence[np.ndarray], request: Request
) -> Iterator[Chunk]:
    """Continues prompts, ids [n] each: `prefill` with as much room as the request needs, then `proceed`.

    Only the last max_len tokens of a prompt are read, unless `request.on_full` is `error`.
    """
    prompts = check_prompts(model.config, prompts, request.on_full)
    _check_request(request, model.config)
    needed = max(map(len, prompts)) + max(request.n_tokens - 1, 0)
    # A power of two, which tiles fill and which needs fewer programs.
    context = min(model.config.max_len, 1 << (needed - 1).bit_length())
    return proceed(model, params, prefill(model, params, prompts, context=context), request)


def prefill(
    model: nn.Module,
    params: optax.Params,
    prompts: Sequence[np.ndarray],
    before: Prefilled | None = None,
    context: int | None = None,
) -> Prefilled:
    """The model after reading all prompts at once; they are right-aligned and share one position counter.

    Args:
      prompts: token ids int [length], each of at least one.
      before: an earlier result to continue from, a row for each prompt; the prompts must be equally long.
      context: tokens that the state has room for in all; None takes max_len.
    """
    prompts = check_prompts(model.config, prompts, "error")
    tokens, lengths = right_aligned(prompts)
    if before is None:
        room = None if models.is_unbounded(model) else context or model.config.max_len
        state = programs.empty_state(
            model, params, len(prompts), model.config.max_len if room is None else room
        )
    else:
        state, room = before.state, before.room
        require(lengths is None, "prompt lengths", [*map(len, prompts)], "equal when continuing from a state")
        require(len(prompts) == len(before.read), "prompts", len(prompts), f"{len(before.read)} as before")
        prompts = [np.concatenate(rows) for rows in zip(before.read, prompts, strict=True)]
    n_read = tokens.shape[1]
    require(
        room is None or n_read <= room, "prompt length", n_read, f"at most the {room} tokens of room left"
    )
    state, logits = programs.read(model, params, state, tokens, lengths)
    return Prefilled(state, logits, tuple(prompts), None if room is None else room - n_read)


def proceed(
    model: nn.Module, params: optax.Params, prefilled: Prefilled, request: Request
) -> Iterator[Chunk]:
    """Continues prompts that were read, at most TILE tokens at a time, until all are drawn or all rows stop.

    The call itself raises UserError, if a value is out of range or, with `error`, the room is too small.
    """
    _check_request(request, model.config)
    if request.on_full == "error" and prefilled.room is not None:
        most = prefilled.room + 1
        allowed = f"at most {most} after the prompt at max_len={model.config.max_len}, or on_full 'slide'"
        require(request.n_tokens <= most, "max_new_tokens", request.n_tokens, allowed)
    # A separate generator, so that the checks above run now and not at the first token.
    return _chunks(model, params, prefilled, request) if request.n_tokens else iter(())


def continuations(chunks: Iterable[Chunk]) -> list[Continuation]:
    """The whole continuation of every row, up to its stop."""
    chunks = list(chunks)
    if not chunks:
        return []
    tokens, log_probs, is_new = (np.concatenate(parts, axis=1) for parts in zip(*chunks, strict=True))
    return [Continuation(t[new], p[new]) for t, p, new in zip(tokens, log_probs, is_new, strict=True)]


def _check_request(request: Request, config: ModelConfig) -> None:
    inside = 0 <= request.n_tokens <= MAX_COUNT
    require(inside, "max_new_tokens", request.n_tokens, f"in 0..{MAX_COUNT}")
    inside = 1 <= request.n_samples <= MAX_COUNT
    require(inside, "num_samples", request.n_samples, f"in 1..{MAX_COUNT}")
    require(0 <= request.seed < 2**32, "seed", request.seed, "in [0, 2**32)")
    choose("on_full", request.on_full, {"slide": None, "error": None})
    n_symbols = request.n_symbols
    within = n_symbols is None or 1 <= n_symbols <= config.vocab_size
    require(within, "n_symbols", n_symbols, f"in 1..vocab_size={config.vocab_size}")
    for token in request.stop_tokens:
        require(0 <= token < config.vocab_size, "stop token", token, f"in 0..{config.vocab_size - 1}")


def _chunks(
    model: nn.Module, params: optax.Params, prefilled: Prefilled, request: Request
) -> Iterator[Chunk]:
    n_prompts, left = len(prefilled.read), request.n_tokens
    sampling = SamplingConfig(request.rule, request.n_symbols, request.lazy)
    rows = SamplingInputs(
        np.tile(np.arange(request.n_samples, dtype=np.uint32) + np.uint32(request.seed), n_prompts),
        np.asarray(request.stop_tokens, np.int32),
    )
    known = [row for row in prefilled.read for _ in range(request.n_samples)]
    state, logits = programs.repeat_rows((prefilled.state, prefilled.logits), request.n_samples)
    room, n_steps, count = prefilled.room, 0, 1
    cursor = Cursor(state, np.zeros(len(known), np.int32), np.int32(0), np.zeros(len(known), bool))
    watches = [] if request.stop_texts is None else [request.stop_texts.watch(row) for row in known]
    cursor, chunk = programs.first_token(sampling, rows, cursor, logits)
    while True:
        chunk, stopped = jax.device_get((chunk, cursor.stopped))
        chunk = Chunk(*(array[:, :count] for array in chunk))
        if watches:
            chunk, stopped = cut(chunk, stopped, watches)
            cursor = cursor._replace(stopped=jnp.asarray(stopped))
        left -= chunk.tokens.shape[1]
        yield chunk
        if left == 0 or stopped.all():
            return
        known = [np.append(row, new) for row, new in zip(known, chunk.tokens, strict=True)]
        if room is not None and n_steps == room:
            known = [row[-max(1, model.config.max_len // 2) :] for row in known]
            again = prefill(model, params, known)
            room, n_steps, count = again.room, 0, 1
            cursor = cursor._replace(state=again.state)
            cursor, chunk = programs.first_token(sampling, rows, cursor, again.logits)
            continue
        count = min(TILE - n_steps % TILE, left)
        count = count if room is None else min(count, room - n_steps)
        cursor, chunk = programs.next_tokens(model, sampling, params, rows, cursor, count)
        n_steps += count
        if due_size(n_steps) and has_tiles(cursor.state):
            cursor = cursor._replace(state=programs.end_tile(cursor.state, due_size(n_steps)))
