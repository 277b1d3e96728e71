"""The language model. Axes: B batch, L length, T new tokens, D channels, V vocabulary."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.config import LanguageModelConfig
from hyena_jax.mixers import is_unbounded
from hyena_jax.mixers.inputs import Shared
from hyena_jax.mixers.layers import Embed, make_norm
from hyena_jax.models.blocks import activation_dtype, apply_blocks, decode_blocks, init_states, make_blocks
from hyena_jax.ops.documents import documents
from hyena_jax.ops.forms import Layout
from hyena_jax.ops.initializers import initializers
from hyena_jax.system.errors import require


class LanguageModelState(NamedTuple):
    """The blocks' states, and the first real position of each row [B]."""

    shared: Shared
    first: jax.Array
    blocks: tuple[Any, ...]


class LanguageModel(nn.Module):
    """Token embedding, blocks, final norm and head.

    Attributes:
      config: its vocab_size V must be known.
      sequence_axis: axis of the ambient mesh over which L is sharded in `__call__` and `hidden`, or None.

    Parameters:
      embedding/embedding [P, D]: row i is token i; also the head, transposed, with tied_head. P is V rounded
        up to a multiple of vocab_multiple; rows from V on have no effect.
      positions [Lmax, D]: row t is added at position t; only with learned_positions.
      embedding_norm/scale [D]: with embedding_norm; of LayerNorm the factor, of RMSNorm the factor less 1.
      embedding_norm/bias [D]: only of LayerNorm.
      blocks_0/*: and so on for n_layers blocks.
      final_norm/scale [D]: of LayerNorm the factor, of RMSNorm the factor less 1.
      final_norm/bias [D]: only of LayerNorm.
      head/kernel [D, P]: only of an untied head.
      head/bias [P]: only with head_bias.
    """

    config: LanguageModelConfig
    sequence_axis: str | None = None
    layout: Layout = Layout()

    @property
    def is_unbounded(self) -> bool:
        """Whether decoding may continue beyond max_len, with a state that does not grow."""
        return not self.config.learned_positions and all(map(is_unbounded, self.config.pattern))

    def setup(self) -> None:
        config = self.config
        dtype = activation_dtype(config)
        init = initializers(config.init, config.n_layers, config.d_model, config.d_model)
        n_rows = -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple
        self.embedding = Embed(n_rows, config.d_model, dtype=dtype, embedding_init=init.embedding)
        if config.learned_positions:
            shape = config.max_len, config.d_model
            self.positions = self.param("positions", init.embedding, shape, jnp.float32)
        if config.embedding_norm != "none":
            self.embedding_norm = make_norm(config.embedding_norm, dtype, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = make_blocks(config, dtype, self.sequence_axis, self.layout)
        self.final_norm = make_norm(config.final_norm, dtype, config.norm_eps)
        if not config.tied_head:
            self.head = nn.Dense(
                n_rows,
                use_bias=config.head_bias,
                dtype=dtype,
                kernel_init=init.head,
                bias_init=init.bias,
            )

    def __call__(
        self, tokens: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """Logits float32 [B, L, V] of tokens int [B, L]; logits t depend on tokens 0..t."""
        return self.logits(self.hidden(tokens, segment_ids, deterministic))

    def hidden(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        deterministic: bool = True,
        n_blocks: int | None = None,
    ) -> jax.Array:
        """The last block's output [B, L, D] for tokens int [B, L].

        Args:
          segment_ids: None, or integers [B, L], for mixers that accept them: each run of equal ids is a
            document, and learned positions restart there.
          n_blocks: only the first so many blocks; None: all.

        Raises:
          ValueError: if tokens are not integers [B, L] with L in 1..max_len, or segment_ids not [B, L].
        """
        self._check(tokens, rank=2)
        length, most = tokens.shape[1], self.config.max_len
        require(1 <= length <= most, "sequence length", length, f"in 1..max_len={most}")
        positions = jnp.arange(length)
        if segment_ids is not None:
            require(segment_ids.shape == tokens.shape, "segment_ids.shape", segment_ids.shape, "[B, L]")
            positions = documents(segment_ids).position
        x = self._embed(tokens, positions)
        x = self.dropout(x, deterministic)
        return apply_blocks(self.blocks[:n_blocks], x, segment_ids, deterministic)

    def features(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        deterministic: bool = True,
        layer: int | None = None,
    ) -> jax.Array:
        """What the head reads [B, L, D], or with `layer` the residual stream after so many blocks."""
        x = self.hidden(tokens, segment_ids, deterministic, layer)
        return self.final_norm(x) if layer is None else x

    def init_state(self, batch_size: int, max_len: int) -> LanguageModelState:
        """The state before the first token of sequences of at most `max_len` tokens."""
        blocks = init_states(self.blocks, batch_size, max_len)
        return LanguageModelState(
            Shared(jnp.zeros((), jnp.int32), {}), jnp.zeros(batch_size, jnp.int32), blocks
        )

    def prefill(
        self,
        state: LanguageModelState,
        tokens: jax.Array,
        lengths: jax.Array | None = None,
        last_only: bool = False,
    ) -> tuple[LanguageModelState, jax.Array]:
        """Logits [B, T, V] of the next tokens [B, T]; with `last_only` [B, 1, V], of the last token alone."""
        self._check(tokens, rank=2)
        n_tokens = tokens.shape[1]
        first = state.first if lengths is None else n_tokens - jnp.asarray(lengths, jnp.int32)
        position = state.shared.position
        x = self._embed_next(tokens, jnp.maximum(position + jnp.arange(n_tokens) - first[:, None], 0))
        blocks, x = decode_blocks(self.blocks, "prefill", state.blocks, x, lengths)
        logits = self.logits(x[:, -1:] if last_only else x)
        return LanguageModelState(Shared(position + n_tokens), first, blocks), logits

    def step(self, state: LanguageModelState, token: jax.Array) -> tuple[LanguageModelState, jax.Array]:
        """Logits [B, V] of the next token [B]."""
        self._check(token, rank=1)
        position = state.shared.position
        x = self._embed_next(token, position - state.first)
        blocks, x = decode_blocks(self.blocks, "step", state.blocks, x)
        return LanguageModelState(Shared(position + 1), state.first, blocks), self.logits(x)

    def _check(self, tokens: jax.Array, rank: int) -> None:
        axes = "[B, L]" if rank == 2 else "[B]"
        require(tokens.ndim == rank and len(tokens) >= 1, "tokens.shape", tokens.shape, axes)
        is_integer = jnp.issubdtype(tokens.dtype, jnp.integer)
        require(is_integer, "tokens.dtype", str(tokens.dtype), "an integer type")

    def _embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        if self.config.scale_embedding:
            scale = self.config.d_model**0.5
            x = x * (float(np.asarray(scale, jnp.bfloat16)) if self.config.round_embedding_scale else scale)
        if self.config.learned_positions:
            x = x + self.positions[positions].astype(x.dtype)
        return x if self.config.embedding_norm == "none" else self.embedding_norm(x)

    def _embed_next(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """As `_embed`; NaN beyond the learned positions: a traced position cannot raise."""
        x = self._embed(tokens, positions)
        is_known = positions < self.config.max_len
        return jnp.where(is_known[..., None], x, jnp.nan) if self.config.learned_positions else x

    def logits(self, x: jax.Array) -> jax.Array:
        """Logits float32 [..., V] of the last block's output x [..., D]."""
        x = self.final_norm(x)
        logits = self.embedding.attend(x) if self.config.tied_head else self.head(x)
        logits = logits[..., : self.config.vocab_size]
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        cap = self.config.soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
