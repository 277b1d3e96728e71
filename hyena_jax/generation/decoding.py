"""The loop that continues prompts. The host only counts; `programs.py` is what the device runs.

Axes: P prompts, R rows (each prompt's samples, one after the other), T tokens of the longest prompt, C tokens
of a piece, V vocabulary.

A prompt is read at once (`prefill`); then one program draws up to `TILE` tokens a call, without a word to the
host in between, and after each `TILE` tokens long convolutions absorb a finished tile
(`hyena_jax.ops.online_conv`). A model is any causal one with logits [B, L, V] of tokens int [B, L]; without
methods that decode by state, or with a mixer that lacks them, it recomputes its context (`recomputation.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hyena_jax import models
from hyena_jax.config import ModelConfig, choose, require
from hyena_jax.config.checks import MOST_COUNT
from hyena_jax.generation import programs
from hyena_jax.generation.programs import Cursor, Drawing, Piece, Rows
from hyena_jax.generation.prompts import OnFull, check_prompts, right_aligned
from hyena_jax.generation.sampling import SamplingRule
from hyena_jax.generation.stopping import StopTexts, cut
from hyena_jax.mixers.long import has_tiles
from hyena_jax.ops.online_conv import TILE, due_size


@dataclass(frozen=True)
class Request:
    """What is to be drawn."""

    n_tokens: int
    """Most tokens of a row."""
    rule: SamplingRule = field(default=SamplingRule())
    """How each is drawn."""
    seed: int = 0
    """Sample i of every prompt draws with seed + i, whatever the other rows are."""
    n_samples: int = 1
    """Samples of each prompt; they share its reading."""
    stop_tokens: tuple[int, ...] = ()
    """A row ends after any of these ids."""
    stop_texts: StopTexts | None = None
    """A row ends after any of these texts. They are looked for after each piece: up to TILE - 1 tokens that
    follow them are drawn and dropped."""
    n_symbols: int | None = None
    """The tokenizer's, where the model's vocabulary is padded beyond it; None draws from all."""
    lazy: bool = False
    """Run long convolutions by one product with the whole history a token: the reference for tiles."""
    on_full: OnFull = "slide"
    """When max_len tokens were read and the state has no more room: `slide` reads the newer half of them
    again, as if nothing had been before; `error` refuses beforehand. A state that does not grow goes on."""


class Prompted(NamedTuple):
    """A model that has read prompts: its state, what it expects next [P, V], and what it has read.

    `room` is how many tokens more the state can read; None where it does not grow.
    """

    state: Any
    logits: jax.Array
    read: tuple[np.ndarray, ...]
    room: int | None


class Continuation(NamedTuple):
    """What was drawn for one row: tokens int32 [n] and their log-probabilities float32 [n]."""

    tokens: np.ndarray
    log_probs: np.ndarray


def generate(
    model: nn.Module, params: optax.Params, prompts: Sequence[np.ndarray], request: Request
) -> Iterator[Piece]:
    """`proceed` after `prefill`, with as much room as the request needs; raises what they do.

    Of a longer prompt than max_len only the end is read, unless `request.on_full` is `error`.
    """
    prompts = check_prompts(model.config, prompts, request.on_full)
    _check_request(request, model.config)
    needed = max(map(len, prompts)) + max(request.n_tokens - 1, 0)
    # Powers of two: tiles fill them, and there are fewer programs.
    context = min(model.config.max_len, 1 << (needed - 1).bit_length())
    return proceed(model, params, prefill(model, params, prompts, context=context), request)


def prefill(
    model: nn.Module,
    params: optax.Params,
    prompts: Sequence[np.ndarray],
    before: Prompted | None = None,
    context: int | None = None,
) -> Prompted:
    """Reads the prompts, of any lengths, at once; they are right-aligned and share one position counter.

    Args:
      prompts: token ids int [length], each of at least one.
      before: what was read earlier, to go on from; its rows are the prompts', which then have one length.
      context: tokens that the state has room for in all; None takes max_len.

    Raises:
      UserError: if a prompt is empty, longer than the room, or holds what is no token; or if the rows differ.
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
        require(lengths is None, "prompt lengths", [*map(len, prompts)], "equal where a state goes on")
        require(len(prompts) == len(before.read), "prompts", len(prompts), f"{len(before.read)}, as before")
        prompts = [np.concatenate(rows) for rows in zip(before.read, prompts, strict=True)]
    n_read = tokens.shape[1]
    require(
        room is None or n_read <= room, "prompt length", n_read, f"at most the {room} tokens of room left"
    )
    state, logits = programs.read(model, params, state, tokens, lengths)
    return Prompted(state, logits, tuple(prompts), None if room is None else room - n_read)


def proceed(model: nn.Module, params: optax.Params, prompted: Prompted, request: Request) -> Iterator[Piece]:
    """Continues what was read.

    Yields:
      Pieces of at most TILE tokens, until there are `request.n_tokens` or every row has stopped.

    Raises:
      UserError: before the first piece, if a value is out of range or, with `error`, the room too small.
    """
    _check_request(request, model.config)
    if request.on_full == "error" and prompted.room is not None:
        most = prompted.room + 1
        allowed = f"at most {most}: all that max_len={model.config.max_len} leaves, or on_full 'slide'"
        require(request.n_tokens <= most, "max_new_tokens", request.n_tokens, allowed)
    # A generator of its own, so that the checks above run now and not at the first token.
    return _pieces(model, params, prompted, request) if request.n_tokens else iter(())


def continuations(pieces: Iterator[Piece]) -> list[Continuation]:
    """All of every row, without what follows its stop."""
    pieces = list(pieces)
    if not pieces:
        return []
    tokens, log_probs, is_new = (np.concatenate(parts, axis=1) for parts in zip(*pieces, strict=True))
    return [Continuation(t[new], p[new]) for t, p, new in zip(tokens, log_probs, is_new, strict=True)]


def _check_request(request: Request, config: ModelConfig) -> None:
    inside = 0 <= request.n_tokens <= MOST_COUNT
    require(inside, "max_new_tokens", request.n_tokens, f"in 0..{MOST_COUNT}")
    inside = 1 <= request.n_samples <= MOST_COUNT
    require(inside, "num_samples", request.n_samples, f"in 1..{MOST_COUNT}")
    require(0 <= request.seed < 2**32, "seed", request.seed, "in [0, 2**32)")
    choose("on_full", request.on_full, {"slide": None, "error": None})
    n_symbols = request.n_symbols
    within = n_symbols is None or 1 <= n_symbols <= config.vocab_size
    require(within, "n_symbols", n_symbols, f"in 1..vocab_size={config.vocab_size}")
    for token in request.stop_tokens:
        require(0 <= token < config.vocab_size, "stop token", token, f"in 0..{config.vocab_size - 1}")


def _pieces(model: nn.Module, params: optax.Params, prompted: Prompted, request: Request) -> Iterator[Piece]:
    """The host's side of the loop: it counts tokens, tiles and room."""
    n_prompts, left = len(prompted.read), request.n_tokens
    drawing = Drawing(request.rule, request.n_symbols, request.lazy)
    rows = Rows(
        jnp.tile(jnp.arange(request.n_samples, dtype=jnp.uint32) + np.uint32(request.seed), n_prompts),
        jnp.asarray(request.stop_tokens, jnp.int32),
    )
    known = [row for row in prompted.read for _ in range(request.n_samples)]
    state, logits = programs.repeat_rows((prompted.state, prompted.logits), request.n_samples)
    room, unread = prompted.room, Cursor(None, None, jnp.zeros((), jnp.int32), jnp.zeros(len(known), bool))
    watches = [] if request.stop_texts is None else [request.stop_texts.watch() for _ in known]
    n_steps = 0
    cursor, piece = programs.first_token(drawing, rows, unread._replace(state=state), logits)
    while True:
        piece, stopped = jax.device_get((piece, cursor.stopped))
        if watches:
            piece, stopped = cut(piece, stopped, watches)
            cursor = cursor._replace(stopped=jnp.asarray(stopped))
        left -= piece.tokens.shape[1]
        yield piece
        if left == 0 or stopped.all():
            return
        known = [np.append(row, new) for row, new in zip(known, piece.tokens, strict=True)]
        if room is not None and n_steps == room:
            known = [row[-max(1, model.config.max_len // 2) :] for row in known]
            again = prefill(model, params, known)
            room, n_steps = again.room, 0
            cursor, piece = programs.first_token(
                drawing, rows, cursor._replace(state=again.state), again.logits
            )
            continue
        count = min(TILE - n_steps % TILE, left)
        count = count if room is None else min(count, room - n_steps)
        cursor, piece = programs.next_tokens(model, drawing, params, rows, cursor, count)
        piece = Piece(*(array[:, :count] for array in piece))
        n_steps += count
        if due_size(n_steps) and has_tiles(cursor.state):
            cursor = cursor._replace(state=programs.end_tile(cursor.state, due_size(n_steps)))
