"""The pure training and evaluation steps.

Axes: B batch, L length, V answers to choose from (a vocabulary, or classes).
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from hyena_jax.models import example_inputs
from hyena_jax.training.loss import answers, cross_entropy, scored
from hyena_jax.training.optimizer import global_norm

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

FINITE = -1


class TrainState(NamedTuple):
    """All that changes while training.

    `bad_step` is the first step whose loss or gradient was not finite, or FINITE: it stays once set, so
    that reading it now and then is enough.
    """

    step: jax.Array
    params: optax.Params
    opt_state: optax.OptState
    bad_step: jax.Array

    def to_items(self) -> dict[str, optax.Params]:
        """The items of a checkpoint; who only needs parameters reads `params` alone."""
        rest = {"step": self.step, "opt_state": self.opt_state, "bad_step": self.bad_step}
        return {"params": self.params, "train_state": rest}

    @classmethod
    def from_items(cls, items: dict[str, optax.Params]) -> "TrainState":
        """The inverse of `to_items`."""
        return cls(params=items["params"], **items["train_state"])


def init_params(model: nn.Module, seed: int) -> optax.Params:
    """The initial parameters that `seed` decides."""
    return jax.jit(model.init)(jax.random.key(seed), example_inputs(model.config))["params"]


def init_state(params: optax.Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(
        jnp.zeros((), jnp.int32), params, optimizer.init(params), jnp.full((), FINITE, jnp.int32)
    )


def make_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    seed: int,
    axis_name: str | None = None,
    accumulation_steps: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """One pure `train_step(state, batch) -> (state, metrics)`.

    Args:
      model: `model.apply({"params": params}, inputs, None, deterministic)` gives logits; see `scored`.
      optimizer: any optax transformation.
      seed: root of the dropout keys; each step and device folds in its own index.
      axis_name: the mapped axis over which gradients and metrics are averaged, or None under plain jit,
        where a mean over the batch is already global.
      accumulation_steps: the batch is cut into this many equal parts, one after the other in memory.

    Returns:
      The step. `batch` holds `inputs` [B, ...] and `targets`, int32 [B, L] or [B]; metrics are float32
      scalars `loss` (mean nats a target) and `grad_norm` (before clipping), and int32 `bad_step`.
    """

    def loss_fn(params: optax.Params, batch: Batch, key: jax.Array) -> jax.Array:
        return scored(cross_entropy, model, params, batch, False, {"dropout": key}).mean()

    def loss_and_grads(params: optax.Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, optax.Params]:
        if accumulation_steps == 1:
            return jax.value_and_grad(loss_fn)(params, batch, key)
        parts = jax.tree.map(cut, batch)

        def add_part(total: tuple, part: tuple[Batch, jax.Array]) -> tuple[tuple, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, *part)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add_part, zero, (parts, jax.random.split(key, accumulation_steps)))
        return jax.tree.map(lambda x: x / accumulation_steps, total)

    def cut(x: jax.Array) -> jax.Array:
        # Part i holds the rows i, i + parts, ...: rows that lie on different devices stay where they are.
        return jnp.moveaxis(x.reshape(-1, accumulation_steps, *x.shape[1:]), 1, 0)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        if axis_name is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        loss, grads = loss_and_grads(state.params, batch, key)
        if axis_name is not None:
            loss, grads = jax.lax.pmean((loss, grads), axis_name)
        grad_norm = global_norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        step = state.step + 1
        is_bad = ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm))
        bad_step = jnp.where((state.bad_step == FINITE) & is_bad, step, state.bad_step)
        metrics = {"loss": loss, "grad_norm": grad_norm, "bad_step": bad_step}
        return TrainState(step, params, opt_state, bad_step), metrics

    return train_step


def make_eval_step(model: nn.Module) -> Callable[[optax.Params, Batch], Metrics]:
    """`eval_step(params, batch)`: for each row of the batch, sums over its targets, float32 [B].

    `batch` also holds `weights` of the shape of `targets`, 0 where a target is padding. Sums by row, not over
    the batch, so that adding them up on the host does not depend on how rows were grouped.
    """

    def score(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        return cross_entropy(logits, targets), answers(logits, targets.ndim) == targets

    def eval_step(params: optax.Params, batch: Batch) -> Metrics:
        weights = batch["weights"]
        nats, correct = scored(score, model, params, batch)
        sums = {
            "count": weights,
            "nats": weights * nats,
            "correct": weights * correct,
            "probability": weights * jnp.exp(-nats),
        }
        return {name: values.reshape(len(values), -1).sum(-1) for name, values in sums.items()}

    return eval_step
