"""The loss and the metrics of an experiment, computed at each target.

Axes: B batch, L length, V classes (tokens of a vocabulary, or labels).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hyena_jax.config import (
    AccuracyConfig,
    CrossEntropyConfig,
    Experiment,
    LossConfig,
    TopKAccuracyConfig,
    UserError,
    describe_fault,
)
from hyena_jax.data.dataset import Dataset
from hyena_jax.training.loss import answers, cross_entropy

Score = Callable[[jax.Array, jax.Array], jax.Array]
"""score(logits, targets) -> values, of the shape of `targets`."""

# Names that training and evaluation use themselves.
TAKEN = {
    *("loss", "count", "nats", "correct", "probability", "perplexity", "bits_per_byte"),
    *("grad_norm", "param_norm", "bad_step", "learning_rate"),
}


def loss_function(config: LossConfig) -> Score:
    """The loss that `config` describes, float; raises UserError when traced with arrays that do not fit."""
    registry = type(config).registry
    name, function = registry.part_of(type(config)).name, registry.target(type(config))
    return partial(_checked, f"the loss {name!r}", (jnp.floating,), partial(function, config))


def metric_functions(experiment: Experiment, data: Dataset) -> dict[str, Score]:
    """The metrics of an experiment and of its data, by label; like `loss_function`, of any real dtype.

    Raises:
      UserError: if two have the same label, or one has a label that training uses itself.
    """
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
    real = (jnp.floating, jnp.integer, jnp.bool_)
    return {label: partial(_checked, f"the metric {label!r}", real, f) for label, f in functions.items()}


def _checked(
    what: str, dtypes: tuple[Any, ...], function: Score, logits: jax.Array, targets: jax.Array
) -> jax.Array:
    """`function(logits, targets)`; UserError unless its values have the shape of `targets`."""
    given = f"logits {_described(logits)} and targets {_described(targets)}"
    try:
        values = jnp.asarray(function(logits, targets))
    except Exception as error:  # the function may be the user's: its faults are input
        raise UserError(f"{what} cannot be computed from {given}: {describe_fault(error)}") from error
    if values.shape != targets.shape:
        raise UserError(
            f"{what} must be of the shape {targets.shape} of the targets, one value each, got"
            f" {_described(values)} of {given}"
        )
    if not any(jnp.issubdtype(values.dtype, dtype) for dtype in dtypes):
        raise UserError(f"{what} must be {' or '.join(d.__name__ for d in dtypes)}, got {values.dtype}")
    return values


def _described(x: jax.Array) -> str:
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"


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


def weighted(values: jax.Array, weights: jax.Array) -> jax.Array:
    """weights * values, and 0 where the weight is 0, even if the value there is not finite."""
    return jnp.where(weights == 0, 0, weights * values)


def train_values(
    loss: Score, metrics: Mapping[str, Score], logits: jax.Array, targets: jax.Array
) -> dict[str, jax.Array]:
    """At each target the values of `loss`, and of each metric in float32, without a gradient."""
    values = {"loss": loss(logits, targets)}
    logits = jax.lax.stop_gradient(logits)
    for label, metric in metrics.items():
        values[label] = metric(logits, targets).astype(jnp.float32)
    return values


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
