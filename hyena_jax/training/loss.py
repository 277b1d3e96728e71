"""The loss and the metrics of an experiment, computed at each target.

If all logits together would take too much memory, they are computed in chunks of the length.

Axes: B batch, L length, D channels, V classes (tokens of a vocabulary, or labels), n scored positions, where
a batch names them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from hyena_jax.config import (
    AccuracyConfig,
    CrossEntropyConfig,
    Experiment,
    LossConfig,
    TopKAccuracyConfig,
    own_code,
)
from hyena_jax.data.dataset import Dataset
from hyena_jax.models import gather_outside_blocks, has_hidden, without_blocks
from hyena_jax.ops.forms import Layout
from hyena_jax.ops.mesh import axis_size, sharded
from hyena_jax.system.errors import UserError, require
from hyena_jax.training.lora import Adapted, merged

Tree = TypeVar("Tree")
Score = Callable[[jax.Array, jax.Array], jax.Array]
"""score(logits, targets) -> values, of the shape of `targets`."""

# Names that training and evaluation use themselves.
TAKEN = {
    *("loss", "count", "nats", "correct", "probability", "perplexity", "bits_per_byte"),
    *("grad_norm", "param_norm", "bad_step", "learning_rate"),
}

# With more logits [B, L, V] than this on one device, the loss is computed in chunks, unless the model's
# config decides.
MAX_LOGITS = 2**26
# Tokens of all rows on a device that a chunk has at least: each chunk reads and writes the gradient of the
# whole head, [D, V], which with fewer tokens takes longer than their products.
LEAST_TOKENS = 1024


def scored(
    score: Callable[[jax.Array, jax.Array], Tree],
    model: nn.Module,
    params: optax.Params,
    batch: dict[str, jax.Array],
    deterministic: bool = True,
    rngs: dict[str, jax.Array] | None = None,
) -> Tree:
    """`score(logits, targets)` for a model's logits at the `inputs` of a batch, and its `targets`.

    A batch may hold `positions`, int [B, n]: target i of a row belongs to the logits at its position i, and a
    model with `hidden` and `logits` computes no others. It may hold `segment_ids`, int [B, L]: each run of
    equal ids is a document, which the model keeps apart from the others.

    Args:
      params: the model's, or `lora.Adapted` ones.
      score: returns arrays of the shape of `targets`; each entry depends only on its own target and logits,
        which may be computed chunk by chunk and recomputed in the backward pass: see
        `LanguageModelConfig.loss_chunk`.
    """
    if isinstance(params, Adapted):
        params = merged(model.config.lora, params)
    layout = getattr(model, "layout", Layout())
    if layout.gathers:
        params = gather_outside_blocks(layout, params)  # once, not in every chunk
    variables, inputs, targets = {"params": params}, batch["inputs"], batch["targets"]
    segment_ids = batch.get("segment_ids")
    if not has_hidden(model):
        return score(
            at_positions(model.apply(variables, inputs, segment_ids, deterministic, rngs=rngs), batch),
            targets,
        )
    hidden = at_positions(
        model.apply(variables, inputs, segment_ids, deterministic, rngs=rngs, method="hidden"), batch
    )
    n_tokens = chunk_tokens(model, targets.shape)
    if n_tokens is None:
        return score(model.apply(variables, hidden, method="logits"), targets)
    leaves, structure = jax.tree.flatten(without_blocks(params))

    def of_shard(x: jax.Array, targets: jax.Array, *leaves: jax.Array, axis_name: str | None) -> Tree:
        variables = {"params": jax.tree.unflatten(structure, leaves)}

        def of_chunk(chunk: tuple[jax.Array, jax.Array]) -> Tree:
            x, targets = chunk
            return score(model.apply(variables, x, method="logits"), targets)

        n_parts = 1 if axis_name is None else axis_size(axis_name)
        return _over_chunks(jax.checkpoint(of_chunk), (x, targets), max(n_tokens // n_parts, 1))

    # Each device adds up its own chunks' gradients of the head, which are exchanged once, not in every chunk.
    axes = ("BLd", "BL", *("w" * leaf.ndim for leaf in leaves))
    of_all = sharded(of_shard, getattr(model, "sequence_axis", None), axes, "BL")
    return of_all(hidden, targets, *leaves)


def at_positions(x: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """The entries [B, n, D] of x [B, L, D] at the `positions` [B, n] of a batch; x itself without them."""
    if "positions" not in batch:
        return x
    return jnp.take_along_axis(x, batch["positions"][..., None], axis=1)


def chunk_tokens(model: nn.Module, shape: tuple[int, ...]) -> int | None:
    """Tokens per row whose logits are in memory at a time, for targets [B, L] or [B]; None for all.

    The field `loss_chunk` of the model's config decides, if it is set. Models without `hidden` and `logits`,
    or without a vocabulary, compute all at once.
    """
    vocab_size = getattr(model.config, "vocab_size", None)
    if vocab_size is None or len(shape) != 2 or not has_hidden(model):
        return None
    batch, length = shape
    rows = -(-batch // getattr(model, "layout", Layout()).row_shards)  # on one device
    most = max(MAX_LOGITS // (rows * vocab_size), LEAST_TOKENS // rows, 1)
    chunk = getattr(model.config, "loss_chunk", None) or most
    return chunk if chunk < length else None


def _over_chunks(
    f: Callable[[tuple[jax.Array, ...]], Tree], arrays: tuple[jax.Array, ...], n_tokens: int
) -> Tree:
    """f of arrays [B, L, ...], in chunks [B, c, ...] with c <= n_tokens one by one; results are [B, L]."""
    batch, length = arrays[0].shape[:2]
    n_chunks = -(-length // n_tokens)
    size = -(-length // n_chunks)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, n_chunks * size - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, n_chunks, size, *x.shape[2:]), 1, 0)

    def join(y: jax.Array) -> jax.Array:
        return jnp.moveaxis(y, 0, 1).reshape(batch, n_chunks * size)[:, :length]

    return jax.tree.map(join, jax.lax.map(f, tuple(map(cut, arrays))))


def loss_function(config: LossConfig) -> Score:
    """The loss that `config` describes; its values are checked where they are computed, in `train_values`."""
    return partial(type(config).registry.target(type(config)), config)


def metric_functions(experiment: Experiment, data: Dataset) -> dict[str, Score]:
    """The metrics of an experiment and of its data, by label; refuses labels given twice or in TAKEN."""
    functions = dict(data.scores)
    for config in experiment.metrics:
        if config.label in functions:
            raise UserError(f"the metric {config.label!r} is given by the experiment and by its data")
        functions[config.label] = partial(type(config).registry.target(type(config)), config)
    for label in functions:
        if label in TAKEN or label in data.tallies:
            raise UserError(
                f"the name {label!r} of a metric is taken; name it other than {', '.join(sorted(TAKEN))}"
            )
    return functions


def weighted(values: jax.Array, weights: jax.Array) -> jax.Array:
    """weights * values, and 0 where the weight is 0, even if the value there is not finite."""
    return jnp.where(weights == 0, 0, weights * values)


def train_values(
    loss: Score, metrics: Mapping[str, Score], logits: jax.Array, targets: jax.Array
) -> dict[str, jax.Array]:
    """At each target the values of `loss`, floating, and of each metric in float32, without a gradient.

    Scores may be the user's: UserError if one fails, or returns other values than one a target.
    """
    given = f"logits {logits.dtype}{[*logits.shape]} and targets {targets.dtype}{[*targets.shape]}"
    found = {}
    for label, score in {"loss": loss, **metrics}.items():
        is_loss = label == "loss"
        what = "the loss" if is_loss else f"the metric {label!r}"
        with own_code(f"{what} cannot be computed from {given}"):
            values = jnp.asarray(score(logits if is_loss else jax.lax.stop_gradient(logits), targets))
        if values.shape != targets.shape:
            raise UserError(
                f"{what} must be of the shape {targets.shape} of the targets, one value each, got"
                f" {values.dtype}{[*values.shape]} of {given}"
            )
        is_real = jnp.issubdtype(values.dtype, jnp.floating) or (not is_loss and not jnp.iscomplexobj(values))
        require(is_real, what, values.dtype.name, "floating" if is_loss else "of a real dtype")
        found[label] = values if is_loss else values.astype(jnp.float32)
    return found


def eval_values(
    loss: Score, metrics: Mapping[str, Score], logits: jax.Array, targets: jax.Array
) -> dict[str, jax.Array]:
    """`train_values`; and `nats`, `correct` and `probability` if the targets are classes."""
    values = train_values(loss, metrics, logits, targets)
    if are_classes(logits, targets):
        nats = cross_entropy(logits, targets)
        correct = answers(logits, targets.ndim) == targets
        values |= {"nats": nats, "correct": correct, "probability": jnp.exp(-nats)}
    return values


def are_classes(logits: jax.Array, targets: jax.Array) -> bool:
    """Whether each target is one of V classes whose log-probabilities the logits give."""
    once_a_patch = targets.ndim == 1 and logits.ndim == 3 and len(logits) == len(targets)
    fits = logits.shape[:-1] == targets.shape or once_a_patch
    return jnp.issubdtype(targets.dtype, jnp.integer) and fits and logits.shape[-1] > 1


def cross_entropy_loss(config: CrossEntropyConfig, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """(1 - a) nll(target) + a mean_v nll(v), nats, with a = label_smoothing; shapes as in `cross_entropy`."""
    nats = cross_entropy(logits, targets)
    if config.label_smoothing == 0:
        return nats
    spread = -jax.nn.log_softmax(logits).mean(-1)
    if logits.ndim == targets.ndim + 2:
        spread = spread.mean(axis=1)
    return (1 - config.label_smoothing) * nats + config.label_smoothing * spread


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Nats at each target, float32, of the shape of `targets`.

    Logits are [B, L, V] for targets [B, L], and [B, V] for targets [B]; or [B, L, V] for targets [B] if a
    model classifies every patch of an image: the label is then every patch's target, and nats are the mean.
    """
    if logits.ndim == targets.ndim + 2:
        labels = jnp.broadcast_to(targets[:, None], logits.shape[:2])
        return cross_entropy(logits, labels).mean(axis=1)

    def gathered(logits: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]

    # For TPUs: the gradient of a gather is a scatter, for which XLA flattens all logits and back.
    def masked(logits: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0).sum(-1)

    total = jax.nn.logsumexp(logits, axis=-1)
    return total - jax.lax.platform_dependent(logits, targets, tpu=masked, default=gathered)


def accuracy(config: AccuracyConfig, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Whether each target is the most probable class, bool."""
    return answers(logits, targets.ndim) == targets


def top_k_accuracy(config: TopKAccuracyConfig, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Whether each target is among the k most probable classes, bool; of equal logits the first wins."""
    if logits.ndim == targets.ndim + 2:  # as in `answers`
        logits = logits.mean(axis=1)
    own = jnp.take_along_axis(logits, targets[..., None], -1)
    is_earlier = jnp.arange(logits.shape[-1]) < targets[..., None]
    n_before = ((logits > own) | ((logits == own) & is_earlier)).sum(-1)
    return n_before < config.k


def answers(logits: jax.Array, n_dims: int) -> jax.Array:
    """The most probable class at each target; `n_dims` is the rank of the targets.

    If a model classifies every patch, the mean over patches of the log-probabilities decides. The mean of the
    logits orders classes alike: in each patch the two differ by a constant.
    """
    if logits.ndim == n_dims + 2:
        logits = logits.mean(axis=1)
    return logits.argmax(-1)
