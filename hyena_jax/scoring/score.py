"""What a language model says of texts: their log-likelihoods, and its hidden states as vectors of them.

Shapes: B rows of a batch, L tokens of a row, D channels, V vocabulary; n tokens of a text, m of them scored.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax

from hyena_jax import parallel
from hyena_jax.config import ParallelConfig
from hyena_jax.config.checks import MAX_COUNT
from hyena_jax.data.dataset import perplexity
from hyena_jax.data.tokenizers import IdsTokenizer, Tokenizer
from hyena_jax.scoring.windows import WindowPlan
from hyena_jax.system.errors import UserError, choose, require
from hyena_jax.training.loss import cross_entropy, scored

Pool = Literal["mean", "last", "none"]
POOLS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda states: states.mean(axis=0, dtype=np.float64, keepdims=True).astype(np.float32),
    "last": lambda states: states[-1:],
    "none": lambda states: states,
}
"""The rows [m, D] of a text, from the states [n, D] of its tokens."""


class Likelihood(NamedTuple):
    """The log-likelihood of a text."""

    tokens: np.ndarray
    """The text's token ids, int32 [n]."""
    log_probs: np.ndarray
    """ln p of each of the last m tokens, given those before it: see `windows`. m is n after a context, and
    n - 1 without one, since nothing precedes the first token."""
    n_bytes: int | None = None
    """UTF-8 bytes of the text; None if unknown."""

    @property
    def log_likelihood(self) -> float:
        """The sum of `log_probs`, in nats."""
        return math.fsum(self.log_probs)

    @property
    def perplexity(self) -> float | None:
        """exp of the mean of -`log_probs`, which is capped at 700; None if no token is scored."""
        return perplexity(-self.log_likelihood / len(self.log_probs)) if len(self.log_probs) else None

    @property
    def bits_per_byte(self) -> float | None:
        """The mean of -`log_probs` in bits, times the tokens per byte of the text, as `eval` counts it."""
        if not self.n_bytes or not len(self.log_probs):
            return None
        bits = -self.log_likelihood / math.log(2)
        return bits / len(self.log_probs) * len(self.tokens) / self.n_bytes


class TextTokens(NamedTuple):
    """A text to be read."""

    tokens: np.ndarray
    """Token ids, int32 [n]."""
    n_bytes: int | None
    """See `Likelihood`."""


class Scoring(NamedTuple):
    """A model and texts, checked, and the plan by which the model reads them."""

    model: nn.Module
    params: optax.Params
    texts: Sequence[TextTokens]
    context: np.ndarray
    """Token ids before every text, int32 [c], which are not scored."""
    n_symbols: int
    """Ids from this one on only pad the model's vocabulary, and get no probability."""
    plan: WindowPlan

    def likelihoods(
        self, first: int = 0, advance: Callable[[int], None] = lambda n_windows: None
    ) -> Iterator[list[Likelihood]]:
        """The scores of the texts in order, block by block, without the blocks that end before text `first`.

        `advance` is called after every batch with the number of its windows.
        """

        def log_likelihood(logits: jax.Array, targets: jax.Array) -> jax.Array:
            return -cross_entropy(logits[..., : self.n_symbols], targets)

        def log_probs(params: optax.Params, batch: dict[str, jax.Array]) -> jax.Array:
            return scored(log_likelihood, self.model, params, batch)

        for block, found in self.read(log_probs, (), np.float64, first, advance):
            texts = (self.texts[i] for i in block)
            yield [Likelihood(text.tokens, x, text.n_bytes) for text, x in zip(texts, found, strict=True)]

    def read(
        self,
        compute: Callable[[optax.Params, dict[str, jax.Array]], jax.Array],
        width: tuple[int, ...],
        dtype: type,
        first: int,
        advance: Callable[[int], None],
    ) -> Iterator[tuple[range, list[np.ndarray]]]:
        """What the model computes for each target of each text, one block of the plan after the other.

        Args:
          compute: (params, batch) -> [B, L, *width], from `inputs` and `targets`, int32 [B, L].
          first, advance: see `likelihoods`.

        Yields:
          The texts of a block, and an array [m, *width] for each.
        """
        strategy = parallel.make_strategy(ParallelConfig())
        step = strategy.map_eval_step(lambda params, batch: {"values": compute(params, batch)})
        params = strategy.place(self.params)
        n_unscored = max(self.plan.n_context, 1)
        for block in self.plan.blocks():
            if block.stop <= first:
                continue
            sequences = {}
            for i in block:
                # No target is read there.
                beyond = np.zeros(self.plan.n_context - len(self.context), np.int32)
                sequences[i] = np.concatenate([self.context, self.texts[i].tokens, beyond])
            found = {i: np.empty((max(len(s) - n_unscored, 0), *width), dtype) for i, s in sequences.items()}
            for batch in self.plan.batches(block):
                # 0 behind the end of a window, which changes nothing before it.
                inputs, targets = np.zeros((2, batch.n_rows, batch.length), np.int32)
                for i, window in enumerate(batch.windows):
                    read = sequences[window.text][window.start : window.start + window.length + 1]
                    inputs[i, : window.length], targets[i, : window.length] = read[:-1], read[1:]
                placed = strategy.place_batch({"inputs": inputs, "targets": targets})
                values = np.asarray(step(params, placed)["values"], dtype)
                values = values.reshape(batch.n_rows, batch.length, *width)
                for row, window in zip(values, batch.windows, strict=False):  # the other rows are padding
                    into = slice(window.targets.start - n_unscored, window.targets.stop - n_unscored)
                    found[window.text][into] = row[window.length - window.scored : window.length]
                advance(len(batch.windows))
            yield block, [found[i] for i in block]

    def embedding(self, names: Sequence[str], layer: int | None, pool: Pool) -> "Embedding":
        """These texts as vectors instead of scores, checked before anything is computed.

        Args:
          names: what errors call the texts.
          layer: the residual stream after so many blocks; None: what the head reads, after the last norm.
          pool: `mean` or `last`: one vector of a text, which may not be empty; `none`: one of each token.
        """
        kind = type(self.model.config).__name__
        require(hasattr(self.model, "features"), "model", kind, "one with a method `features`")
        choose("pool", pool, POOLS)
        most = self.model.config.n_layers
        require(layer is None or 0 <= layer <= most, "layer", layer, f"in 0..{most}, the model's blocks")
        for name, text in zip(names, self.texts, strict=True):
            has_rows = pool == "none" or len(text.tokens) > 0
            require(has_rows, name, "no token", f"at least one token long, for pool {pool!r}")
        # A window of the plan predicts the token after each input: here each input of a text counts itself.
        plan = replace(self.plan, n_context=len(self.context) + 1)
        return Embedding(self._replace(plan=plan), layer, pool)


class Embedding(NamedTuple):
    """Texts, checked, and how their vectors are made."""

    scoring: Scoring
    layer: int | None
    pool: Pool

    @property
    def sizes(self) -> list[int]:
        """The rows of each text."""
        return [len(text.tokens) if self.pool == "none" else 1 for text in self.scoring.texts]

    def vectors(self, advance: Callable[[int], None] = lambda n_windows: None) -> Iterator[np.ndarray]:
        """The rows of one text after the other, float32 [m, D]; `advance` as of `Scoring.likelihoods`."""
        model = self.scoring.model

        def states(params: dict, batch: dict[str, jax.Array]) -> jax.Array:
            inputs = batch["inputs"]
            found = model.apply({"params": params}, inputs, None, True, self.layer, method="features")
            return found.astype("float32")

        width = (model.config.d_model,)
        for _, found in self.scoring.read(states, width, np.float32, 0, advance):
            yield from map(POOLS[self.pool], found)


def plan_scoring(
    model: nn.Module,
    params: optax.Params,
    tokenizer: Tokenizer,
    texts: Sequence[str | Sequence[int] | np.ndarray],
    names: Sequence[str],
    prefix: str | Sequence[int] | np.ndarray = "",
    stride: int | None = None,
    batch_size: int = 16,
) -> Scoring:
    """Checks everything before anything is computed.

    Args:
      tokenizer: may have a start token `bos`, which then begins the context of every text.
      texts: texts or token ids.
      names: what errors call them.
      prefix: text or token ids before every text, after the start token.
      stride: see `windows`; None: half of the model's max_len.
      batch_size: windows of max_len tokens at once.
    """
    for name in ("max_len", "vocab_size"):
        kind = type(model.config).__name__
        require(hasattr(model.config, name), "model", kind, f"one whose config has {name}")
    max_len, n_symbols = model.config.max_len, min(model.config.vocab_size, tokenizer.vocab_size)
    stride = -(-max_len // 2) if stride is None else stride
    require(1 <= stride <= max_len, "stride", stride, f"in 1..{max_len}, the model's max_len")
    require(1 <= batch_size <= MAX_COUNT, "batch_size", batch_size, f"in 1..{MAX_COUNT}")
    bos = getattr(tokenizer, "bos", None)
    start = np.array([] if bos is None else [bos], np.int32)
    context = np.concatenate([start, _encoded(tokenizer, "prefix", prefix, n_symbols).tokens])
    n_context = len(context)
    require(n_context <= max_len, "prefix", f"{n_context} tokens", f"at most the model's max_len={max_len}")
    encoded = [_encoded(tokenizer, name, text, n_symbols) for name, text in zip(names, texts, strict=True)]
    row_shards = parallel.make_strategy(ParallelConfig()).row_shards
    sizes = tuple(len(text.tokens) for text in encoded)
    plan = WindowPlan(sizes, n_context, max_len, stride, batch_size, row_shards)
    return Scoring(model, params, encoded, context, n_symbols, plan)


def _encoded(
    tokenizer: Tokenizer, name: str, text: str | Sequence[int] | np.ndarray, n_symbols: int
) -> TextTokens:
    """A text's tokens; its bytes are unknown if it is given as ids."""
    if isinstance(text, str):
        try:
            ids = tokenizer.encode(text).astype(np.int32)  # which refuses a text that has no bytes
            return TextTokens(ids, None if isinstance(tokenizer, IdsTokenizer) else len(text.encode()))
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    ids = np.asarray(text)
    is_list = ids.ndim == 1 and (ids.size == 0 or np.issubdtype(ids.dtype, np.integer))
    require(is_list, name, f"{ids.dtype} {ids.shape}", "a text, or integers [length]")
    wrong = ids[(ids < 0) | (ids >= n_symbols)]
    require(wrong.size == 0, f"{name}: token ids", wrong[:1].tolist(), f"in 0..{n_symbols - 1}")
    return TextTokens(ids.astype(np.int32), None)
