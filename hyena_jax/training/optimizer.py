"""An experiment's optimizer, and parameter groups for any update direction. Knows pytrees, not models."""

import math
import re
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax

from hyena_jax.config import GroupedOptimizerConfig, OptimizerConfig, ParameterGroup, UserError
from hyena_jax.training.schedules import make_schedule
from hyena_jax.trees import named_leaves, path_name


def make_optimizer(
    config: OptimizerConfig, params: optax.Params, total_steps: int
) -> optax.GradientTransformation:
    """The transformation of `config`; one of the user's own is tried on the parameters' shapes.

    Args:
      params: the parameters, or their shapes.

    Raises:
      UserError: if the config's class is not registered; if its function does not make a transformation, or
        one that fails on these parameters; if a group matches no parameter. See also `make_schedule`.
    """
    part = OptimizerConfig.registry.part_of(type(config))
    make, what = OptimizerConfig.registry.target(type(config)), f"optimizer {part.name!r}"
    schedule = make_schedule(config, total_steps)
    try:
        optimizer = make(config, schedule, params)
        if not isinstance(optimizer, optax.GradientTransformation):
            raise UserError(f"{what} must be an optax.GradientTransformation, got {optimizer!r}")
        if not part.config_class.__module__.startswith("hyena_jax."):  # tracing large models takes a second
            _check_update(what, optimizer, params)
    except UserError:
        raise
    except Exception as error:  # the function may be the user's: its faults are input
        raise UserError(f"{what} fails on these parameters: {type(error).__name__}: {error}") from error
    return optimizer


def _check_update(what: str, optimizer: optax.GradientTransformation, params: optax.Params) -> None:
    """Refuses an optimizer whose update changes the structure of the parameters or of its state."""

    def form(tree: tuple) -> tuple:
        return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]

    def update() -> tuple:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        state = optimizer.init(zeros)
        updates, new = optimizer.update(zeros, state, zeros)
        return (zeros, state), (optax.apply_updates(zeros, updates), new)

    before, after = jax.eval_shape(update)
    if form(before) != form(after):
        raise UserError(
            f"{what} must give updates of the parameters' shapes, and a state like the one before"
        )


def in_groups(
    config: GroupedOptimizerConfig,
    schedule: optax.Schedule,
    params: optax.Params,
    direction: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Clipping by global norm, `direction`, then decoupled weight decay and learning rate for each group.

    A group's learning rate follows the schedule in proportion to its peak. Parameters of a group with
    learning rate 0 are constants: their gradients do not count in the global norm either.

    Args:
      direction: from gradients to an ascent direction, which the learning rate multiplies, such as
        `optax.scale_by_adam()`.

    Raises:
      UserError: if a group matches no parameter, or its pattern is not a regular expression.
    """
    groups = complete_groups(config)
    labels = label_parameters(config.groups, params)

    def rule(group: ParameterGroup) -> optax.GradientTransformation:
        scale = -group.learning_rate / config.learning_rate
        return optax.chain(optax.add_decayed_weights(group.weight_decay), optax.scale(scale))

    constant = {i: optax.set_to_zero() for i, group in enumerate(groups) if group.learning_rate == 0}
    trained = {i: optax.identity() for i in range(len(groups))}
    return optax.chain(
        optax.partition(trained | constant, labels),
        optax.clip_by_global_norm(config.clip_norm or math.inf),
        direction,
        optax.partition({i: rule(group) for i, group in enumerate(groups)}, labels),
        optax.scale_by_schedule(schedule),
    )


def complete_groups(config: GroupedOptimizerConfig) -> list[ParameterGroup]:
    """The groups with all learning rates and decays filled in; the last group matches everything else."""
    return [
        ParameterGroup(
            group.pattern,
            config.learning_rate if group.learning_rate is None else group.learning_rate,
            config.weight_decay if group.weight_decay is None else group.weight_decay,
        )
        for group in (*config.groups, ParameterGroup(pattern=""))
    ]


def label_parameters(groups: Iterable[ParameterGroup], params: optax.Params) -> optax.Params:
    """The tree of `params` with, at each leaf, the index of the first group that matches its path.

    Leaves that no group matches get the number of groups.
    """
    groups = tuple(groups)
    patterns = [
        compile_pattern(f"optimizer.groups.{i}.pattern", group.pattern) for i, group in enumerate(groups)
    ]

    def label(path: jax.tree_util.KeyPath, _: jax.Array) -> int:
        name = path_name(path)
        return next((i for i, pattern in enumerate(patterns) if pattern.search(name)), len(patterns))

    labels = jax.tree_util.tree_map_with_path(label, params)
    used = set(jax.tree.leaves(labels))
    for i, group in enumerate(groups):
        if i not in used and not group.optional:
            names = list(named_leaves(params))
            raise UserError(
                f"optimizer.groups.{i}.pattern {group.pattern!r} matches no parameter that earlier groups"
                f" left: correct it, remove the group, or allow this by --optimizer.groups.{i}.optional;"
                f" paths are like {names[0]!r} and {names[-1]!r}"
            )
    return labels


def compile_pattern(what: str, pattern: str) -> re.Pattern[str]:
    """The regular expression `pattern`; UserError if it is not one."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{what} {pattern!r} is not a regular expression: {error}") from error


def global_norm(tree: optax.Params) -> jax.Array:
    """The Euclidean norm of all leaves together, float32 []."""
    return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), tree))
