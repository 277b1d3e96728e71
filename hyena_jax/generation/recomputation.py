"""Decoding with a model that has no decoding state: its context is recomputed for every token.

Axes: B rows, T new tokens, S tokens that there is room for, D channels, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax import models
from hyena_jax.config import ModelConfig


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
        return state, self._logits(state, jnp.maximum(at[:, -1:] if last_only else at, 0))

    def step(self, state: Context, token: jax.Array) -> tuple[Context, jax.Array]:
        """Logits [B, V] of the next token [B]."""
        state, logits = self.prefill(state, token[:, None])
        return state, logits[:, 0]

    def _logits(self, state: Context, at: jax.Array) -> jax.Array:
        """Logits [B, n, V] at the positions `at` [B, n] of the rows."""
        if models.has_hidden(self.model):
            hidden = self.model.hidden(state.tokens, None, True)
            return self.model.logits(jnp.take_along_axis(hidden, at[..., None], axis=1))
        return jnp.take_along_axis(self.model(state.tokens, None, True), at[..., None], axis=1)


def with_state(model: nn.Module) -> nn.Module:
    """The model if it decodes by state; else the same model, decoding by recomputation."""
    return model if models.decodes_by_state(model) else Recomputing(model)


def note_recomputation(model: nn.Module, note: Callable[[str], None]) -> None:
    """Notes that the model decodes by recomputation, if so, and because of which modules."""
    if names := models.without_state(model):
        have = "has" if len(names) == 1 else "have"
        note(f"{' and '.join(names)} {have} no decoding state: the context is recomputed for every token")
