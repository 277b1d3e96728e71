"""How the next token is drawn. Axes: R rows, V vocabulary."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp

from hyena_jax.config import AtLeast, Between, Checked
from hyena_jax.system.errors import require


@dataclass(frozen=True)
class SamplingRule(Checked):
    """How the next token is drawn from the logits; the restrictions apply in the order of the fields."""

    greedy: bool = False
    """Take the most probable token; requires the other fields at their defaults."""
    temperature: float = 1.0
    """Divides the logits."""
    top_k: Annotated[int | None, AtLeast(1)] = None
    """Only the k most probable tokens."""
    top_p: Annotated[float | None, Between(0, 1, "(]")] = None
    """Only the fewest most probable tokens whose probabilities sum to at least p."""
    min_p: Annotated[float | None, Between(0, 1, "(]")] = None
    """Only tokens with at least p times the probability of the most probable one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.temperature > 0, "temperature", self.temperature, "above 0 (for 0 use --greedy)")
        default = (self.temperature, self.top_k, self.top_p, self.min_p) == (1.0, None, None, None)
        allowed = "given without temperature, top_k, top_p and min_p"
        require(default or not self.greedy, "greedy", self.greedy, allowed)


def sample(logits: jax.Array, keys: jax.Array, rule: SamplingRule) -> jax.Array:
    """Token ids int32 [R] drawn from logits [R, V] with keys [R], so that rows are independent."""
    if rule.greedy:
        return logits.argmax(-1).astype(jnp.int32)
    # Shifted so that the largest logit is 0 and stays finite at any temperature.
    logits = (logits - logits.max(-1, keepdims=True)) / max(rule.temperature, 1e-30)
    if rule.top_k is not None and rule.top_k < logits.shape[-1]:
        values, kept = jax.lax.top_k(logits, rule.top_k)  # of equal logits, those of the lowest ids
        rows = jnp.arange(logits.shape[0])[:, None]
        logits = jnp.full_like(logits, -jnp.inf).at[rows, kept].set(values)
    if rule.top_p is not None and rule.top_p < 1:
        # A token stays if the more probable ones together have a probability below top_p.
        order = jnp.argsort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        ranks = jnp.argsort(order, axis=-1)
        is_in = (before < rule.top_p).at[:, 0].set(True)  # a tiny top_p is 0 in float32
        logits = jnp.where(jnp.take_along_axis(is_in, ranks, axis=-1), logits, -jnp.inf)
    if rule.min_p is not None:
        logits = jnp.where(logits < jnp.log(rule.min_p), -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
