"""The language model. Axes: B batch, L length, T new tokens, D channels, V vocabulary."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import LanguageModelConfig, require
from hyena_jax.models.blocks import Block


class Shared(NamedTuple):
    """What the batch has in common: tokens seen []."""

    position: jax.Array


class LanguageModelState(NamedTuple):
    """The blocks' states, and the first real position of each row [B]."""

    shared: Shared
    first: jax.Array
    blocks: tuple[Any, ...]


class LanguageModel(nn.Module):
    """Embedding, pre-norm blocks, final LayerNorm, and a head tied to the embedding.

    The states follow the mixer contract, with tokens in and logits out.
    """

    config: LanguageModelConfig

    def setup(self) -> None:
        config = self.config
        dtype = None if config.dtype == "float32" else jnp.dtype(config.dtype)
        init = nn.initializers.normal(0.02)
        self.embedding = nn.Embed(config.vocab_size, config.d_model, dtype=dtype, embedding_init=init)
        if config.learned_positions:
            self.positions = self.param("positions", init, (config.max_len, config.d_model))
        self.dropout = nn.Dropout(config.dropout)
        # The module itself is argument 0, so argument 3 is `deterministic`, a Python bool.
        block = nn.remat(Block, static_argnums=(3,)) if config.remat else Block
        self.blocks = [
            block(config.pattern[i % len(config.pattern)], config, dtype) for i in range(config.n_layers)
        ]
        self.final_norm = nn.LayerNorm(epsilon=1e-5, dtype=dtype)

    def __call__(
        self, tokens: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """Logits float32 [B, L, V] of tokens int [B, L]; logits t depend on tokens 0..t.

        Args:
          segment_ids: None, or ids [B, L] that separate documents, for mixers that can.
          deterministic: False applies dropout, from the RNG stream `dropout`.

        Raises:
          ValueError: if L exceeds max_len.
        """
        length = tokens.shape[1]
        require(
            length <= self.config.max_len, "sequence length", length, f"at most max_len={self.config.max_len}"
        )
        x = self._embed(tokens, jnp.arange(length))
        x = self.dropout(x, deterministic)
        for block in self.blocks:
            x = block(x, segment_ids, deterministic)
        return self._logits(x)

    def init_state(self, batch_size: int, max_len: int) -> LanguageModelState:
        """The state before the first token of sequences of at most `max_len` tokens."""
        blocks = tuple(block.init_state(batch_size, max_len) for block in self.blocks)
        return LanguageModelState(Shared(jnp.zeros((), jnp.int32)), jnp.zeros(batch_size, jnp.int32), blocks)

    def prefill(
        self, state: LanguageModelState, tokens: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[LanguageModelState, jax.Array]:
        """Logits [B, T, V] of the next tokens [B, T]; see the mixer contract for `lengths`."""
        n_tokens = tokens.shape[1]
        first = state.first if lengths is None else n_tokens - lengths
        position = state.shared.position
        x = self._embed(tokens, jnp.maximum(position + jnp.arange(n_tokens) - first[:, None], 0))
        blocks = []
        for block, block_state in zip(self.blocks, state.blocks, strict=True):
            block_state, x = block.prefill(block_state, x, lengths)
            blocks.append(block_state)
        return LanguageModelState(Shared(position + n_tokens), first, tuple(blocks)), self._logits(x)

    def step(self, state: LanguageModelState, token: jax.Array) -> tuple[LanguageModelState, jax.Array]:
        """Logits [B, V] of the next token [B]."""
        position = state.shared.position
        x = self._embed(token, position - state.first)
        blocks = []
        for block, block_state in zip(self.blocks, state.blocks, strict=True):
            block_state, x = block.step(block_state, x)
            blocks.append(block_state)
        return LanguageModelState(Shared(position + 1), state.first, tuple(blocks)), self._logits(x)

    def _embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        if self.config.learned_positions:
            x = x + self.positions[positions].astype(x.dtype)
        return x

    def _logits(self, x: jax.Array) -> jax.Array:
        logits = self.embedding.attend(self.final_norm(x))
        return logits.astype(jnp.float32) if logits.dtype == jnp.bfloat16 else logits
