"""Vectors of texts: the hidden states of a language model, of each token or pooled.

A token's state depends on the tokens before it, as in scoring: `windows` says how long texts are read.

Shapes: B rows of a batch, L tokens of a row, D channels, n tokens of a text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import jax
import numpy as np

from hyena_jax.scoring.score import Scoring
from hyena_jax.system.errors import choose, require

Pool = Literal["mean", "last", "none"]
POOLS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda states: states.mean(axis=0, dtype=np.float64, keepdims=True).astype(np.float32),
    "last": lambda states: states[-1:],
    "none": lambda states: states,
}
"""The rows [m, D] of a text, from the states [n, D] of its tokens."""


class Embedding(NamedTuple):
    """Texts, checked, and how the model reads them."""

    scoring: Scoring
    layer: int | None
    pool: Pool

    @property
    def sizes(self) -> list[int]:
        """The rows of each text."""
        return [len(text.tokens) if self.pool == "none" else 1 for text in self.scoring.texts]

    def vectors(self, advance: Callable[[int], None] = lambda n_windows: None) -> Iterator[np.ndarray]:
        """The rows of one text after the other, float32 [m, D].

        Args:
          advance: called after every batch with the number of its windows.
        """
        model = self.scoring.model

        def states(params: dict, batch: dict[str, jax.Array]) -> jax.Array:
            inputs = batch["inputs"]
            found = model.apply({"params": params}, inputs, None, True, self.layer, method="features")
            return found.astype("float32")

        width = (model.config.d_model,)
        for _, found in self.scoring.read(states, width, np.float32, 0, advance):
            yield from map(POOLS[self.pool], found)


def prepare(scoring: Scoring, names: Sequence[str], layer: int | None, pool: Pool) -> Embedding:
    """Checks everything before anything is computed.

    Args:
      scoring: the texts, of which nothing is scored here.
      names: what errors call the texts.
      layer: the residual stream after so many blocks; None: what the head reads, after the last norm.
      pool: `mean` or `last`: one vector of a text; `none`: one of each of its tokens.

    Raises:
      UserError: if the model has no such layer, or a text to pool is empty.
    """
    model = scoring.model
    require(hasattr(model, "features"), "model", type(model.config).__name__, "one with a method `features`")
    choose("pool", pool, POOLS)
    most = model.config.n_layers
    require(layer is None or 0 <= layer <= most, "layer", layer, f"in 0..{most}, the model's blocks")
    for name, text in zip(names, scoring.texts, strict=True):
        has_rows = pool == "none" or len(text.tokens) > 0
        require(has_rows, name, "no token", f"at least one token long, for pool {pool!r}")
    # A window of the plan predicts the token after each input: here each input of a text counts itself.
    plan = replace(scoring.plan, n_context=len(scoring.context) + 1)
    return Embedding(scoring._replace(plan=plan), layer, pool)
