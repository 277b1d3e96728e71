"""The pure training and evaluation steps.

Axes: B batch, L length.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from hyena_jax.config.registry import parts_in
from hyena_jax.models import example_inputs
from hyena_jax.ops.forms import Layout
from hyena_jax.training.drawing import by_kind
from hyena_jax.training.lora import Adapted
from hyena_jax.training.loss import Score, cross_entropy, eval_values, scored, train_values, weighted
from hyena_jax.training.optimizer import global_norm

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Gradients = Callable[[optax.Params, optax.Params | None, Batch, jax.Array], tuple[optax.Params, Metrics]]
"""See `make_gradients`."""
Tally = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""tally(correct, targets, weights) -> [B] or [B, m], to be summed over rows."""

FINITE = -1
NO_METRICS: Mapping[str, Score] = MappingProxyType({})


class TrainState(NamedTuple):
    """Everything that changes while training.

    `bad_step` is the first step whose loss or gradient was not finite, or FINITE. Once set, it stays set, so
    reading it now and then is enough. With LoRA, `params` are the factors alone, and `base` the model's
    parameters, which stay as they are and are not part of checkpoints.
    """

    step: jax.Array
    params: optax.Params
    opt_state: optax.OptState
    bad_step: jax.Array
    base: optax.Params | None = None

    @property
    def model_params(self) -> optax.Params | Adapted:
        """What `scored` reads."""
        return self.params if self.base is None else Adapted(self.base, self.params)

    def to_items(self) -> dict[str, optax.Params]:
        """The items of a checkpoint: `params`, which can be read alone, and `train_state`."""
        rest = {"step": self.step, "opt_state": self.opt_state, "bad_step": self.bad_step}
        return {"params": self.params, "train_state": rest}

    @classmethod
    def from_items(cls, items: dict[str, optax.Params]) -> "TrainState":
        """The inverse of `to_items`."""
        return cls(params=items["params"], **items["train_state"])


def init_params(model: nn.Module, seed: int) -> optax.Params:
    """Initial parameters, drawn from `seed`."""
    return _drawing(model, tuple(parts_in(model.config)))(jax.random.key(seed))


# Models of equal configs are equal, so that each is traced once, for shapes and values; a notebook may define
# their parts again.
@lru_cache(maxsize=32)
def _drawing(model: nn.Module, parts: tuple) -> Callable[[jax.Array], optax.Params]:
    return by_kind(lambda key: model.init(key, example_inputs(model.config))["params"])


def init_state(params: optax.Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; one program makes what is not given."""
    rest = jax.jit(lambda given: (jnp.int32(0), optimizer.init(given), jnp.int32(FINITE)))
    step, opt_state, bad_step = rest(params)
    return TrainState(step, params, opt_state, bad_step)


def make_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    seed: int,
    axis_name: str | None = None,
    accumulation_steps: int = 1,
    loss: Score = cross_entropy,
    metrics: Mapping[str, Score] = NO_METRICS,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """One pure `train_step(state, batch) -> (state, metrics)`.

    `batch` holds `inputs` [B, ...] and `targets`, int32 [B, L] or [B], and may hold `weights`, float32 of
    their shape: means over targets are then sum(w x) / sum(w), with both sums over all devices and parts, and
    0 if all weights are 0. The step's metrics are float32 scalars: the means of `loss` and of each metric,
    `grad_norm` (before clipping), and int32 `bad_step`.

    Args:
      model: `model.apply({"params": params}, inputs, None, deterministic)` gives logits; see `scored`.
      seed: root of the dropout keys; each step and device folds in its own index.
      axis_name: the mapped axis over which gradients and metrics are averaged, or None under plain jit,
        where a mean over the batch is already global.
      accumulation_steps: equal parts of the batch, of which only one is in memory at a time.
      loss: the score that is minimised, see `loss.Score`.
    """
    gradients = make_gradients(model, axis_name, accumulation_steps, loss, metrics)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = _dropout_key(model, seed, state)
        return _updated(optimizer, state, *gradients(state.params, state.base, batch, key))

    return train_step


def make_joint_step(
    model: nn.Module,
    optimizers: Sequence[optax.GradientTransformation],
    seeds: Sequence[int],
    gradients: Gradients,
) -> Callable[
    [tuple[TrainState, ...], tuple[Batch, ...]], tuple[tuple[TrainState, ...], tuple[Metrics, ...]]
]:
    """`step(states, batches) -> (states, metrics)`: the training steps of several runs of one model.

    Gradients, of `make_gradients`, are computed for all runs at once, by `vmap`; updates, which cost little,
    one after the other, so that optimizers may differ in all their settings. Each run's values are those of
    its `make_train_step`, but for rounding, and on TPUs for the masks of dropout. The runs may be at
    different steps.
    """

    def joint_step(
        states: tuple[TrainState, ...], batches: tuple[Batch, ...]
    ) -> tuple[tuple[TrainState, ...], tuple[Metrics, ...]]:
        inputs = [
            (state.params, state.base, batch, _dropout_key(model, seed, state))
            for state, batch, seed in zip(states, batches, seeds, strict=True)
        ]
        stacked = jax.vmap(gradients)(*jax.tree.map(lambda *leaves: jnp.stack(leaves), *inputs))
        done = []
        for i, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
            grads, means = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
            done.append(_updated(optimizer, state, grads, means))
        return tuple(zip(*done, strict=True))

    return joint_step


def make_gradients(
    model: nn.Module,
    axis_name: str | None = None,
    accumulation_steps: int = 1,
    loss: Score = cross_entropy,
    metrics: Mapping[str, Score] = NO_METRICS,
) -> Gradients:
    """`gradients(params, base, batch, key)`: the gradient, and the means of the loss and the metrics.

    Arguments as in `make_train_step`; `key` is the step's dropout key.
    """
    score = partial(train_values, loss, metrics)

    def loss_fn(
        params: optax.Params,
        base: optax.Params | None,
        batch: Batch,
        key: jax.Array,
        total: jax.Array | None,
    ) -> tuple[jax.Array, Metrics]:
        """Means over the targets of `batch`; given `total`, the sum of all weights, its part of the means."""
        read = params if base is None else Adapted(base, params)
        values = scored(score, model, read, batch, False, {"dropout": key})
        if total is None:
            means = {name: x.mean() for name, x in values.items()}
        else:
            means = {name: weighted(x, batch["weights"]).sum() / total for name, x in values.items()}
        return means["loss"], means

    gradient = jax.grad(loss_fn, has_aux=True)

    def gradients(
        params: optax.Params, base: optax.Params | None, batch: Batch, key: jax.Array
    ) -> tuple[optax.Params, Metrics]:
        total = batch["weights"].sum() if "weights" in batch else None
        if axis_name is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
            total = None if total is None else jax.lax.psum(total, axis_name)
        total = None if total is None else jnp.where(total > 0, total, 1)
        if accumulation_steps == 1:
            grads, means = gradient(params, base, batch, key, total)
        else:

            def add_part(sums: tuple, part: tuple[Batch, jax.Array]) -> tuple[tuple, None]:
                return jax.tree.map(jnp.add, sums, gradient(params, base, *part, total)), None

            # Part i holds the rows i, i + parts, ..., so that rows on different devices stay there.
            parts = jax.tree.map(
                lambda x: jnp.moveaxis(x.reshape(-1, accumulation_steps, *x.shape[1:]), 1, 0), batch
            )
            zeros = jax.tree.map(jnp.zeros_like, params), {name: jnp.zeros(()) for name in ("loss", *metrics)}
            keys = jax.random.split(key, accumulation_steps)
            (grads, means), _ = jax.lax.scan(add_part, zeros, (parts, keys))
            if total is None:
                grads, means = jax.tree.map(lambda x: x / accumulation_steps, (grads, means))
        if axis_name is not None:
            reduce = jax.lax.pmean if total is None else jax.lax.psum
            means, grads = reduce((means, grads), axis_name)
        return grads, means

    return gradients


def _dropout_key(model: nn.Module, seed: int, state: TrainState) -> jax.Array:
    random_bits = getattr(model, "layout", Layout()).random_bits
    return jax.random.fold_in(jax.random.key(seed, impl=random_bits), state.step)


def _updated(
    optimizer: optax.GradientTransformation, state: TrainState, grads: optax.Params, means: Metrics
) -> tuple[TrainState, Metrics]:
    grad_norm = global_norm(grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    step = state.step + 1
    is_bad = ~(jnp.isfinite(means["loss"]) & jnp.isfinite(grad_norm))
    bad_step = jnp.where((state.bad_step == FINITE) & is_bad, step, state.bad_step)
    measured = {**means, "grad_norm": grad_norm, "bad_step": bad_step}
    return TrainState(step, params, opt_state, bad_step, state.base), measured


def make_eval_step(
    model: nn.Module,
    loss: Score = cross_entropy,
    metrics: Mapping[str, Score] = NO_METRICS,
    tallies: Mapping[str, Tally] = NO_METRICS,
) -> Callable[[optax.Params, Batch], Metrics]:
    """`eval_step(params, batch)`: for each row of the batch, sums over its targets, float32 [B].

    Sums of `loss` and `metrics`; of the weights, as `count`; and, if targets are classes, of `nats` (negative
    log-likelihoods), `correct` and `probability`, whatever the loss. `batch` also holds `weights` of the
    shape of `targets`, 0 where a target is padding. Sums are by row: adding them up on the host then does not
    depend on how rows were batched. `tallies` are the data's: see `Dataset`.
    """
    score = partial(eval_values, loss, metrics)

    def eval_step(params: optax.Params, batch: Batch) -> Metrics:
        weights = batch["weights"]
        values = scored(score, model, params, batch)
        sums = {"count": weights, **{name: weighted(x, weights) for name, x in values.items()}}
        rows = {name: x.reshape(len(x), -1).sum(-1) for name, x in sums.items()}
        counted = {name: f(values["correct"], batch["targets"], weights) for name, f in tallies.items()}
        return {**rows, **counted}

    return eval_step


# Not part of the training step: only the steps that are logged need it.
param_norm = jax.jit(global_norm)
