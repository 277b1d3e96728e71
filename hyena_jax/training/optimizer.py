"""AdamW with parameter groups. Knows pytrees, not models."""

import math
import re
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax

from hyena_jax.config import OptimizerConfig, ParameterGroup, UserError


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Linear warm-up from 0, cosine to `final_learning_rate`, then constant.

    The cosine ends at `decay_steps`, or at `total_steps` where that is None: then a run that is prolonged
    follows a different schedule than one that was long from the start.
    """
    end = max(config.decay_steps or total_steps, config.warmup_steps + 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=end,
        end_value=config.final_learning_rate,
    )


def make_optimizer(
    config: OptimizerConfig, params: optax.Params, total_steps: int
) -> optax.GradientTransformation:
    """Clip by global norm, Adam moments, decoupled decay and learning rate for each group.

    A group's learning rate follows the schedule in proportion to its peak. Parameters of a group with
    learning rate 0 are constants: their gradients do not count in the global norm either.

    Raises:
      UserError: if a group matches no parameter, or its pattern is not a regular expression.
    """
    groups = complete_groups(config)
    labels = label_parameters(config.groups, params)
    schedule = make_schedule(config, total_steps)

    def rule(group: ParameterGroup) -> optax.GradientTransformation:
        scale = -group.learning_rate / config.learning_rate
        return optax.chain(optax.add_decayed_weights(group.weight_decay), optax.scale(scale))

    constant = {i: optax.set_to_zero() for i, group in enumerate(groups) if group.learning_rate == 0}
    trained = {i: optax.identity() for i in range(len(groups))}
    return optax.chain(
        optax.partition(trained | constant, labels),
        optax.clip_by_global_norm(config.clip_norm or math.inf),
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.partition({i: rule(group) for i, group in enumerate(groups)}, labels),
        optax.scale_by_schedule(schedule),
    )


def complete_groups(config: OptimizerConfig) -> list[ParameterGroup]:
    """The groups with every learning rate and decay filled in; the last one takes what the others leave."""
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

    Leaves that no group matches get the index after the last.
    """
    patterns = [_compile(group.pattern) for group in groups]

    def label(path: jax.tree_util.KeyPath, _: jax.Array) -> int:
        name = path_name(path)
        return next((i for i, pattern in enumerate(patterns) if pattern.search(name)), len(patterns))

    labels = jax.tree_util.tree_map_with_path(label, params)
    used = set(jax.tree.leaves(labels))
    for i, pattern in enumerate(patterns):
        if i not in used:
            names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
            raise UserError(
                f"optimizer.groups.{i}.pattern {pattern.pattern!r} matches no parameter that earlier groups "
                f"left; paths are like {names[0]!r} and {names[-1]!r}"
            )
    return labels


def path_name(path: jax.tree_util.KeyPath) -> str:
    """A leaf's path as `block_0/mixer/in_proj/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"optimizer.groups pattern {pattern!r} is not a regular expression: {error}"
        ) from error


def global_norm(tree: optax.Params) -> jax.Array:
    """The Euclidean norm of all leaves together, float32 []."""
    return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), tree))
