"""The built-in optimizers, one for each config: each is an update direction for `in_groups`."""

import math

import jax
import optax

from hyena_jax.config import AdafactorConfig, AdamWConfig, LionConfig, MuonConfig, SGDConfig, UserError
from hyena_jax.training.optimizer import compile_pattern, in_groups
from hyena_jax.trees import path_name


def adamw(
    config: AdamWConfig, schedule: optax.Schedule, params: optax.Params
) -> optax.GradientTransformation:
    """Adam's bias-corrected moments."""
    return in_groups(config, schedule, params, optax.scale_by_adam(config.b1, config.b2, config.eps))


def lion(config: LionConfig, schedule: optax.Schedule, params: optax.Params) -> optax.GradientTransformation:
    """The sign of b1 m + (1 - b1) g."""
    return in_groups(config, schedule, params, optax.scale_by_lion(config.b1, config.b2))


def adafactor(
    config: AdafactorConfig, schedule: optax.Schedule, params: optax.Params
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


def sgd(config: SGDConfig, schedule: optax.Schedule, params: optax.Params) -> optax.GradientTransformation:
    """The momentum, or the gradient if there is no momentum."""
    momentum = optax.trace(config.momentum, config.nesterov) if config.momentum else optax.identity()
    return in_groups(config, schedule, params, momentum)


def muon(config: MuonConfig, schedule: optax.Schedule, params: optax.Params) -> optax.GradientTransformation:
    """The momentum, orthogonalised and scaled, for matrices; Adam's direction for other parameters.

    Raises:
      UserError: if `config.matrices` matches no matrix.
    """
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
