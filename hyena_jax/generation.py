"""Sampling rules, and the loop that continues a prompt. Axes: B samples, C context, V vocabulary."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hyena_jax.config import UserError, require
from hyena_jax.models import LanguageModel


@dataclass(frozen=True)
class SamplingRule:
    """How the next token is drawn from the logits; the restrictions apply in the order of the fields."""

    greedy: bool = False
    """Take the most probable token; the other fields must keep their defaults."""
    temperature: float = 1.0
    """Divides the logits."""
    top_k: int | None = None
    """Only the k most probable tokens."""
    top_p: float | None = None
    """Only the fewest most probable tokens whose probabilities reach p together."""

    def __post_init__(self) -> None:
        require(self.temperature > 0, "temperature", self.temperature, "above 0 (use greedy for the limit)")
        require(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "at least 1")
        require(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        default = (self.temperature, self.top_k, self.top_p) == (1.0, None, None)
        require(
            default or not self.greedy, "greedy", self.greedy, "alone, without temperature, top_k or top_p"
        )


def sample(logits: jax.Array, key: jax.Array, rule: SamplingRule) -> jax.Array:
    """Token ids int32 [B] drawn from logits [B, V]."""
    if rule.greedy:
        return logits.argmax(-1).astype(jnp.int32)
    # The largest logit is 0 first, so that even the smallest temperature leaves it finite.
    logits = (logits - logits.max(-1, keepdims=True)) / max(rule.temperature, 1e-30)
    if rule.top_k is not None and rule.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, rule.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if rule.top_p is not None:
        logits = jnp.where(_in_nucleus(logits, rule.top_p), logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def _in_nucleus(logits: jax.Array, top_p: float) -> jax.Array:
    """Whether the more probable tokens together stay below top_p."""
    order = jnp.argsort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    ranks = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(before < top_p, ranks, axis=-1)


def generate(
    model: LanguageModel,
    params: optax.Params,
    prompt: np.ndarray,
    n_tokens: int,
    rule: SamplingRule,
    seed: int,
    n_samples: int = 1,
    n_symbols: int | None = None,
) -> Iterator[np.ndarray]:
    """Continues a prompt by `n_tokens` tokens, `n_samples` times at once.

    Every token is computed from its whole context again. When the context of `model.config.max_len` tokens
    is full it slides: the oldest token is forgotten.

    Args:
      prompt: token ids int [P], P >= 1; of a longer prompt than the context only the end is read.
      n_symbols: the tokenizer's, where the model's vocabulary is padded beyond it; None draws from all.

    Yields:
      The next tokens int32 [n_samples], n_tokens times.

    Raises:
      UserError: if the prompt is empty or a count is out of range.
    """
    if len(prompt) == 0:
        raise UserError("prompt must hold at least one token, got an empty one")
    require(n_tokens >= 0, "max_new_tokens", n_tokens, "at least 0")
    require(n_samples >= 1, "num_samples", n_samples, "at least 1")
    require(0 <= seed < 2**32, "seed", seed, "in [0, 2**32)")
    # A generator of its own, so that the checks above run now and not at the first token.
    return _tokens(
        make_next_token(model, rule, n_symbols),
        model.config.max_len,
        params,
        prompt,
        n_tokens,
        seed,
        n_samples,
    )


def _tokens(
    next_token: Callable,
    context: int,
    params: optax.Params,
    prompt: np.ndarray,
    n_tokens: int,
    seed: int,
    n_samples: int,
) -> Iterator[np.ndarray]:
    known = np.asarray(prompt[-context:], np.int32)
    tokens = np.zeros((n_samples, context), np.int32)
    tokens[:, : len(known)] = known
    tokens, length, key = jnp.asarray(tokens), jnp.int32(len(known)), jax.random.key(seed)
    for i in range(n_tokens):
        tokens, length, new = next_token(params, tokens, length, jax.random.fold_in(key, i))
        yield np.asarray(new)


def make_next_token(model: LanguageModel, rule: SamplingRule, n_symbols: int | None = None) -> Callable:
    """A jitted `(params, tokens [B, C], length, key) -> (tokens, length, new [B])`.

    The first `length` of the C tokens are the context; what follows them is padding, which a causal model
    does not see. One trace serves all lengths.
    """

    @jax.jit
    def next_token(
        params: optax.Params, tokens: jax.Array, length: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        context = tokens.shape[1]
        logits = model.apply({"params": params}, tokens)[..., :n_symbols]
        new = sample(jax.lax.dynamic_index_in_dim(logits, length - 1, axis=1, keepdims=False), key, rule)
        is_full = length == context
        tokens = jnp.where(is_full, jnp.roll(tokens, -1, axis=1), tokens)
        length = jnp.where(is_full, length, length + 1)
        return tokens.at[:, length - 1].set(new), length, new

    return next_token
