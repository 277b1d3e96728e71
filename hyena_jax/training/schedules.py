"""Learning-rate schedules, one for each config.

Each takes the config, the peak rate and the number of steps that the run trains.
"""

import jax
import jax.numpy as jnp
import optax

from hyena_jax.config import (
    ConstantConfig,
    CosineConfig,
    DecayScheduleConfig,
    LinearConfig,
    OptimizerConfig,
    ScheduleConfig,
    UserError,
    WarmupScheduleConfig,
    WarmupStableDecayConfig,
    describe_fault,
)


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of updates so far.

    If the config does not say when the decay ends, it ends at `total_steps`: then a run that is extended
    later follows a different schedule than one that had all steps from the start.

    Raises:
      UserError: if the config's class is not registered, or its function does not make a schedule.
    """
    registry = ScheduleConfig.registry
    make, name = registry.target(type(config.schedule)), registry.part_of(type(config.schedule)).name
    try:
        schedule = make(config.schedule, config.learning_rate, total_steps)
        rate = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except UserError:
        raise
    except Exception as error:  # the function may be the user's: its errors are wrong input
        raise UserError(f"schedule {name!r} fails: {describe_fault(error)}") from error
    if not isinstance(rate, jax.ShapeDtypeStruct) or rate.shape != ():
        raise UserError(f"schedule {name!r} must give one learning rate for a step, got {rate}")
    return schedule


def cosine(config: CosineConfig, peak: float, total_steps: int) -> optax.Schedule:
    """Warm-up, then peak ((1 - f) (1 + cos(pi t / T)) / 2 + f) over T steps; f is the final fraction."""
    decay = _end(config, total_steps) - config.warmup_steps
    return _warmed_up(config, peak, optax.cosine_decay_schedule(peak, decay, _final_fraction(config, peak)))


def linear(config: LinearConfig, peak: float, total_steps: int) -> optax.Schedule:
    """Warm-up, then linear decay to the final rate."""
    decay = _end(config, total_steps) - config.warmup_steps
    return _warmed_up(config, peak, optax.linear_schedule(peak, _final_fraction(config, peak) * peak, decay))


def constant(config: ConstantConfig, peak: float, total_steps: int) -> optax.Schedule:
    """Warm-up, then the peak rate."""
    return _warmed_up(config, peak, optax.constant_schedule(peak))


def warmup_stable_decay(config: WarmupStableDecayConfig, peak: float, total_steps: int) -> optax.Schedule:
    """Warm-up, then the peak rate, then linear decay to the final rate."""
    end = _end(config, total_steps)
    decay = min(max(1, round(config.decay_fraction * end)), end - config.warmup_steps)
    stable = end - config.warmup_steps - decay
    final = _final_fraction(config, peak) * peak
    return _warmed_up(config, peak, optax.linear_schedule(peak, final, decay, transition_begin=stable))


def _end(config: DecayScheduleConfig, total_steps: int) -> int:
    return max(config.decay_steps or total_steps, config.warmup_steps + 1)


def _final_fraction(config: DecayScheduleConfig, peak: float) -> float:
    return config.final_fraction if config.final_learning_rate is None else config.final_learning_rate / peak


def _warmed_up(config: WarmupScheduleConfig, peak: float, after: optax.Schedule) -> optax.Schedule:
    """From 0 to the peak in `warmup_steps`, then `after`, which starts counting there."""
    if config.warmup_steps == 0:
        return after
    rise = optax.linear_schedule(0.0, peak, config.warmup_steps)
    return optax.join_schedules([rise, after], [config.warmup_steps])
