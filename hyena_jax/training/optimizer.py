"""The optimizers, each an update direction applied under the rules of parameter groups, and their schedules.

A schedule takes its config, the peak rate and the number of steps that the run trains. Knows pytrees, not
models.
"""

import math
import re
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax

from hyena_jax.config import optimizers, own_code
from hyena_jax.system.errors import UserError
from hyena_jax.system.trees import named_leaves, path_name


def make_optimizer(
    config: optimizers.OptimizerConfig, params: optax.Params, total_steps: int
) -> optax.GradientTransformation:
    """The optax transformation of `config`; a user's own is first traced on the parameters' shapes.

    `params` may be shapes. UserError if a user's function fails or makes something else, or a group matches
    no parameter.
    """
    part = optimizers.OptimizerConfig.registry.part_of(type(config))
    make, what = optimizers.OptimizerConfig.registry.target(type(config)), f"optimizer {part.name!r}"
    schedule = make_schedule(config, total_steps)
    with own_code(f"{what} fails on these parameters"):
        optimizer = make(config, schedule, params)
        if not isinstance(optimizer, optax.GradientTransformation):
            raise UserError(f"must be an optax.GradientTransformation, got {optimizer!r}", what)
        if not part.config_class.__module__.startswith("hyena_jax."):  # tracing large models takes a second
            _check_update(what, optimizer, params)
    return optimizer


def _check_update(what: str, optimizer: optax.GradientTransformation, params: optax.Params) -> None:
    """Refuses an optimizer whose update changes the structure of the parameters or of its state."""

    def update() -> tuple:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        state = optimizer.init(zeros)
        updates, new = optimizer.update(zeros, state, zeros)
        return (zeros, state), (optax.apply_updates(zeros, updates), new)

    before, after = jax.eval_shape(update)
    for leaf in jax.tree.leaves(before):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise UserError(
                f"{what} must keep a state of numbers, which can be saved, got {leaf.dtype}; keep"
                " jax.random.key_data(key) instead"
            )
    if _form(before) != _form(after):
        raise UserError(
            f"{what} must give updates of the parameters' shapes, and a state like the one before"
        )


def _form(tree: optax.Params) -> tuple:
    return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def have_equal_states(
    a: optax.GradientTransformation, b: optax.GradientTransformation, params: optax.Params
) -> bool:
    """Whether one can continue from the other's state; `params` may be shapes."""
    return _form(jax.eval_shape(a.init, params)) == _form(jax.eval_shape(b.init, params))


def adamw(
    config: optimizers.AdamWConfig, schedule: optax.Schedule, params: optax.Params
) -> optax.GradientTransformation:
    """Adam's bias-corrected moments."""
    return in_groups(config, schedule, params, optax.scale_by_adam(config.b1, config.b2, config.eps))


def lion(
    config: optimizers.LionConfig, schedule: optax.Schedule, params: optax.Params
) -> optax.GradientTransformation:
    """The sign of b1 m + (1 - b1) g."""
    return in_groups(config, schedule, params, optax.scale_by_lion(config.b1, config.b2))


def adafactor(
    config: optimizers.AdafactorConfig, schedule: optax.Schedule, params: optax.Params
) -> optax.GradientTransformation:
    """Gradients over the root of their factored second moment, clipped, relative to each parameter's size."""
    scale = optax.scale_by_factored_rms(
        decay_rate=config.decay_rate,
        min_dim_size_to_factor=config.min_dim_size_to_factor,
        epsilon=config.eps,
    )
    clip = optax.clip_by_block_rms(config.clipping_threshold or math.inf)
    relative = optax.scale_by_param_block_rms() if config.multiply_by_parameter_scale else optax.identity()
    return in_groups(config, schedule, params, optax.chain(scale, clip, relative))


def sgd(
    config: optimizers.SGDConfig, schedule: optax.Schedule, params: optax.Params
) -> optax.GradientTransformation:
    """The momentum, or the gradient if there is no momentum."""
    momentum = optax.trace(config.momentum, config.nesterov) if config.momentum else optax.identity()
    return in_groups(config, schedule, params, momentum)


def muon(
    config: optimizers.MuonConfig, schedule: optax.Schedule, params: optax.Params
) -> optax.GradientTransformation:
    """The momentum, orthogonalised and scaled, for matrices; Adam's direction for other parameters."""
    pattern = compile_pattern("optimizer.matrices", config.matrices)

    def kind(path: jax.tree_util.KeyPath, leaf: jax.Array) -> str:
        return "muon" if leaf.ndim >= 2 and pattern.search(path_name(path)) else "adam"

    kinds = jax.tree_util.tree_map_with_path(kind, params)
    if "muon" not in jax.tree.leaves(kinds):
        raise UserError(
            f"optimizer.matrices {config.matrices!r} must match a parameter with two axes or more"
        )
    orthogonal = optax.contrib.scale_by_muon(
        ns_steps=config.ns_steps,
        beta=config.beta,
        eps=config.eps,
        nesterov=config.nesterov,
        weight_dimension_numbers=lambda updates: jax.tree.map(
            lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates
        ),
    )

    def scaled(update: jax.Array) -> jax.Array:
        n_in, n_out = update.shape[-2:]
        if config.consistent_rms is None:
            return update * math.sqrt(max(1, n_out / n_in))
        return update * (config.consistent_rms * math.sqrt(max(n_in, n_out)))

    scale = optax.stateless(lambda updates, _: jax.tree.map(scaled, updates))
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    direction = optax.partition({"muon": optax.chain(orthogonal, scale), "adam": adam}, kinds)
    return in_groups(config, schedule, params, direction)


def in_groups(
    config: optimizers.GroupedOptimizerConfig,
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
    """
    groups = complete_groups(config)
    labels = label_parameters(config.groups, params)

    def rule(group: optimizers.ParameterGroup) -> optax.GradientTransformation:
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


def complete_groups(config: optimizers.GroupedOptimizerConfig) -> list[optimizers.ParameterGroup]:
    """The groups with all learning rates and decays filled in; the last group matches everything else."""
    return [
        optimizers.ParameterGroup(
            group.pattern,
            config.learning_rate if group.learning_rate is None else group.learning_rate,
            config.weight_decay if group.weight_decay is None else group.weight_decay,
        )
        for group in (*config.groups, optimizers.ParameterGroup(pattern=""))
    ]


def label_parameters(groups: Iterable[optimizers.ParameterGroup], params: optax.Params) -> optax.Params:
    """The tree of `params` with, at each leaf, the index of the first group that matches its path.

    Leaves that no group matches get the number of groups; UserError if a group that is not optional has none.
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
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"{what} {pattern!r} is not a regular expression: {error}") from error


def global_norm(tree: optax.Params) -> jax.Array:
    """The Euclidean norm of all leaves together, float32 []."""
    return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), tree))


def make_schedule(config: optimizers.OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of updates so far.

    If the config does not say when the decay ends, it ends at `total_steps`: then a run that is extended
    later follows a different schedule than one that had all steps from the start.
    """
    registry = optimizers.ScheduleConfig.registry
    make, name = registry.target(type(config.schedule)), registry.part_of(type(config.schedule)).name
    with own_code(f"schedule {name!r} fails"):
        schedule = make(config.schedule, config.learning_rate, total_steps)
        rate = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    if not isinstance(rate, jax.ShapeDtypeStruct) or rate.shape != ():
        raise UserError(f"schedule {name!r} must give one learning rate for a step, got {rate}")
    return schedule


def cosine(config: optimizers.CosineConfig, peak: float, total_steps: int) -> optax.Schedule:
    """Warm-up, then peak ((1 - f) (1 + cos(pi t / T)) / 2 + f) over T steps; f is the final fraction."""
    end, final = _decay(config, peak, total_steps)
    return _warmed_up(config, peak, optax.cosine_decay_schedule(peak, end - config.warmup_steps, final))


def linear(config: optimizers.LinearConfig, peak: float, total_steps: int) -> optax.Schedule:
    """Warm-up, then linear decay to the final rate."""
    end, final = _decay(config, peak, total_steps)
    return _warmed_up(config, peak, optax.linear_schedule(peak, final * peak, end - config.warmup_steps))


def constant(config: optimizers.ConstantConfig, peak: float, total_steps: int) -> optax.Schedule:
    """Warm-up, then the peak rate."""
    return _warmed_up(config, peak, optax.constant_schedule(peak))


def warmup_stable_decay(
    config: optimizers.WarmupStableDecayConfig, peak: float, total_steps: int
) -> optax.Schedule:
    """Warm-up, then the peak rate, then linear decay to the final rate."""
    end, final = _decay(config, peak, total_steps)
    decay = min(max(1, round(config.decay_fraction * end)), end - config.warmup_steps)
    stable = end - config.warmup_steps - decay
    after = optax.linear_schedule(peak, final * peak, decay, transition_begin=stable)
    return _warmed_up(config, peak, after)


def _decay(config: optimizers.DecayScheduleConfig, peak: float, total_steps: int) -> tuple[int, float]:
    """The step at which the decay ends, and the fraction of the peak that is left then."""
    rate = config.final_learning_rate
    end = max(config.decay_steps or total_steps, config.warmup_steps + 1)
    return end, config.final_fraction if rate is None else rate / peak


def _warmed_up(config: optimizers.WarmupScheduleConfig, peak: float, after: optax.Schedule) -> optax.Schedule:
    """From its initial fraction to the peak in `warmup_steps`, then `after`, which starts counting there."""
    if config.warmup_steps == 0:
        return after
    rise = optax.linear_schedule(config.initial_fraction * peak, peak, config.warmup_steps)
    return optax.join_schedules([rise, after], [config.warmup_steps])
