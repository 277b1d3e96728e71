"""The device programs of the decoding loop: reading prompts, sampling tokens, absorbing tiles.

A model that has no decoding state is `Recomputing`: its context is recomputed for every token.

Axes: P prompts, R rows (each prompt's samples, one after the other), T tokens of the longest prompt, C tokens
of a chunk, V vocabulary; of `Recomputing`, B rows, T new tokens, S tokens that there is room for, D channels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hyena_jax import models
from hyena_jax.config import ModelConfig
from hyena_jax.generation.sampling import SamplingRule, sample
from hyena_jax.mixers.online import map_histories
from hyena_jax.ops import online_conv
from hyena_jax.ops.online_conv import TILE


class Context(NamedTuple):
    """The tokens that were read, int32 [B, S]; row b holds its n_read[b] tokens first, then zeros."""

    tokens: jax.Array
    n_read: jax.Array


class Recomputing(nn.Module):
    """A causal model with `init_state`, `prefill` and `step` that call only its parallel form.

    The rows are left-aligned, so that rows of different lengths need no mask: a causal model's output at a
    token does not depend on the zeros that follow. A step costs as much as scoring S tokens. `model` gives
    logits [B, L, V] of tokens int [B, L]; its parameters are the parameters of this module.
    """

    model: nn.Module

    def setup(self) -> None:
        nn.share_scope(self, self.model)

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.model.config

    def init_state(self, batch_size: int, max_len: int) -> Context:
        """The state before the first token of sequences of at most `max_len` tokens."""
        return Context(jnp.zeros((batch_size, max_len), jnp.int32), jnp.zeros(batch_size, jnp.int32))

    def prefill(
        self, state: Context, tokens: jax.Array, lengths: jax.Array | None = None, last_only: bool = False
    ) -> tuple[Context, jax.Array]:
        """Logits [B, T, V] of the next tokens [B, T], or [B, 1, V]; as of `LanguageModel.prefill`."""
        n_tokens, room = tokens.shape[1], state.tokens.shape[1]
        first = 0 if lengths is None else n_tokens - lengths[:, None]
        at = state.n_read[:, None] + jnp.arange(n_tokens) - first
        rows = jnp.arange(len(tokens))[:, None]
        # The padding before a row's first token is dropped.
        kept = state.tokens.at[rows, jnp.where(at < 0, room, at)].set(tokens, mode="drop")
        state = Context(kept, at[:, -1] + 1)
        read = jnp.maximum(at[:, -1:] if last_only else at, 0)[..., None]
        if models.has_hidden(self.model):
            hidden = self.model.hidden(kept, None, True)
            return state, self.model.logits(jnp.take_along_axis(hidden, read, axis=1))
        return state, jnp.take_along_axis(self.model(kept, None, True), read, axis=1)

    def step(self, state: Context, token: jax.Array) -> tuple[Context, jax.Array]:
        """Logits [B, V] of the next token [B]."""
        state, logits = self.prefill(state, token[:, None])
        return state, logits[:, 0]


def with_state(model: nn.Module) -> nn.Module:
    """The model if it decodes by state; else the same model, decoding by recomputation."""
    return model if models.decodes_by_state(model) else Recomputing(model)


def note_recomputation(model: nn.Module, note: Callable[[str], None]) -> None:
    """Notes that the model decodes by recomputation, if so, and because of which modules."""
    if names := models.without_state(model):
        have = "has" if len(names) == 1 else "have"
        note(f"{' and '.join(names)} {have} no decoding state: the context is recomputed for every token")


class Chunk(NamedTuple):
    """The next C tokens of all rows, NumPy arrays [R, C].

    Log-probabilities are the model's, before temperature and restrictions. `is_new` is False after a row has
    stopped, where tokens and log-probabilities are meaningless.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    is_new: np.ndarray


class Cursor(NamedTuple):
    """What each token changes: state, last token [R], tokens drawn so far [], stopped rows bool [R]."""

    state: Any
    token: jax.Array
    index: jax.Array
    stopped: jax.Array


class SamplingInputs(NamedTuple):
    """The seed of each row, uint32 [R], and the tokens that stop any row, int32 [n]."""

    seeds: jax.Array
    stop_tokens: jax.Array


class SamplingConfig(NamedTuple):
    """The part of a `Request` that programs are compiled for."""

    rule: SamplingRule
    n_symbols: int | None
    lazy: bool


def repeat_rows(state: Any, count: int) -> Any:
    """A state, or any tree of arrays with rows first, with each row repeated `count` times."""

    def repeat(path: tuple, leaf: jax.Array) -> jax.Array:
        is_shared = any(getattr(key, "name", None) == "shared" for key in path)
        return leaf if is_shared else jnp.repeat(leaf, count, axis=0)

    return state if count == 1 else jax.tree_util.tree_map_with_path(repeat, state)


@partial(jax.jit, static_argnames=("model", "batch_size", "context"))
def empty_state(model: nn.Module, params: optax.Params, batch_size: int, context: int) -> Any:
    """The state before the first token of sequences of at most `context` tokens."""
    return with_state(model).apply({"params": params}, batch_size, context, method="init_state")


@partial(jax.jit, static_argnames="model")
def read(
    model: nn.Module, params: optax.Params, state: Any, tokens: jax.Array, lengths: jax.Array | None
) -> tuple[Any, jax.Array]:
    """The state after tokens [P, T], and the logits [P, V] after the last of them."""
    state, logits = with_state(model).apply(
        {"params": params}, state, tokens, lengths, True, method="prefill"
    )
    return state, logits[:, -1]


@partial(jax.jit, static_argnames="sampling")  # does not donate: what was read can serve another request
def first_token(
    sampling: SamplingConfig, rows: SamplingInputs, cursor: Cursor, logits: jax.Array
) -> tuple[Cursor, Chunk]:
    """The first new token, and the state prepared for the steps after it."""
    cursor, drawn = _draw(sampling, rows, cursor, logits)
    state = cursor.state if sampling.lazy else map_histories(online_conv.open_tiles, cursor.state)
    return cursor._replace(state=state), jax.tree.map(lambda x: x[:, None], drawn)


@partial(jax.jit, static_argnames=("model", "sampling"), donate_argnames="cursor")
def next_tokens(
    model: nn.Module,
    sampling: SamplingConfig,
    params: optax.Params,
    rows: SamplingInputs,
    cursor: Cursor,
    count: jax.Array,
) -> tuple[Cursor, Chunk]:
    """The next `count` <= TILE tokens, in the first columns of a chunk; stops early if all rows stop."""

    def is_going(carry: tuple[jax.Array, Cursor, Chunk]) -> jax.Array:
        return (carry[0] < count) & ~carry[1].stopped.all()

    def draw_one(carry: tuple[jax.Array, Cursor, Chunk]) -> tuple[jax.Array, Cursor, Chunk]:
        i, cursor, chunk = carry
        state, logits = with_state(model).apply({"params": params}, cursor.state, cursor.token, method="step")
        cursor, drawn = _draw(sampling, rows, cursor._replace(state=state), logits)
        chunk = jax.tree.map(lambda all, new: all.at[:, i].set(new), chunk, drawn)
        return i + 1, cursor, chunk

    shape = (len(rows.seeds), TILE)
    empty = Chunk(jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(shape, bool))
    _, cursor, chunk = jax.lax.while_loop(is_going, draw_one, (jnp.zeros((), jnp.int32), cursor, empty))
    return cursor, chunk


@partial(jax.jit, static_argnames="size", donate_argnames="state")
def end_tile(state: Any, size: int) -> Any:
    """The state after a tile of `size` steps, the one that is due, in each of its long convolutions."""
    return map_histories(partial(online_conv.absorb, size=size), state)


def _draw(
    sampling: SamplingConfig, rows: SamplingInputs, cursor: Cursor, logits: jax.Array
) -> tuple[Cursor, Chunk]:
    """Draws a token per row from logits [R, V]; the chunk has arrays [R]."""
    logits = logits[:, : sampling.n_symbols]
    keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), cursor.index))(rows.seeds)
    token = sample(logits, keys, sampling.rule)
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, token[:, None], axis=1)[:, 0]
    stopped = cursor.stopped | (token[:, None] == rows.stop_tokens).any(1)
    return Cursor(cursor.state, token, cursor.index + 1, stopped), Chunk(token, log_prob, ~cursor.stopped)
