"""Low-rank adaptation (LoRA): kernels W + s A B, of which only the factors A and B are trained.

Hu et al. 2021 (arXiv:2106.09685), section 4.1: h = W_0 x + (alpha / r) B A x. Kernels here are [in, out],
the transpose of the paper's, so A [in, r] and B [r, out] are its A and B transposed. Rank stabilised, the
scale is alpha / sqrt(r) (Kalajdzievski 2023, arXiv:2312.03732). The sum is computed in the forward pass, from
the base parameters and a tree of factors: neither modules nor the paths of their parameters change. Knows
pytrees, not models.
"""

import re
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import unflatten_dict

from hyena_jax.config import Experiment, GroupedOptimizerConfig, LoRAConfig, ModelConfig, OptimizerConfig
from hyena_jax.system.errors import require
from hyena_jax.system.trees import named_leaves

KERNEL, A, B = "/kernel", "/lora_a", "/lora_b"
"""Ends of paths: of a dense kernel, and of the two factors that take its place."""


class Adapted(NamedTuple):
    """The parameters of an adapted model."""

    base: optax.Params
    """Those of the model, before the adaptation."""
    factors: optax.Params
    """lora_a float32 [in, r] and lora_b [r, out] in the place of each target's kernel [in, out]."""


def lora_of(model: ModelConfig) -> LoRAConfig | None:
    """The adaptation that a model's config asks for; None if all parameters are trained."""
    config = getattr(model, "lora", None)
    return None if config is None or config.rank is None else config


def without_lora(experiment: Experiment) -> Experiment:
    """The experiment of the merged parameters."""
    if lora_of(experiment.model) is None:
        return experiment
    return replace(experiment, model=replace(experiment.model, lora=LoRAConfig()))


def init_factors(config: LoRAConfig, shapes: optax.Params, seed: int) -> optax.Params:
    """Factors whose product is 0: A uniform in +-1 / sqrt(in), as a dense layer of PyTorch, and B zero.

    Args:
      shapes: the base parameters, or their shapes.

    Raises:
      UserError: see `target_shapes`.
    """
    factors = {}
    targets = target_shapes(config, shapes)
    keys = jax.random.split(jax.random.key(seed), len(targets))
    for key, (name, (n_in, n_out)) in zip(keys, targets.items(), strict=True):
        stem, bound = name.removesuffix(KERNEL), n_in**-0.5
        factors[stem + A] = jax.random.uniform(key, (n_in, config.rank), jnp.float32, -bound, bound)
        factors[stem + B] = jnp.zeros((config.rank, n_out), jnp.float32)
    return unflatten_dict(factors, sep="/")


def target_shapes(config: LoRAConfig, shapes: optax.Params) -> dict[str, tuple[int, int]]:
    """The paths and shapes [in, out] of the kernels that are adapted.

    Raises:
      UserError: if the pattern matches no dense kernel, or a kernel is too small for the rank.
    """
    kernels = {
        name: leaf.shape
        for name, leaf in named_leaves(shapes).items()
        if f"/{name}".endswith(KERNEL) and leaf.ndim == 2
    }
    found = {name: shape for name, shape in kernels.items() if re.search(config.targets, name)}
    some = f"; paths are like {next(iter(kernels))!r}" if kernels else ", but there is none"
    require(bool(found), "model.lora.targets", config.targets, f"a match of a dense kernel{some}")
    name = min(found, key=lambda name: min(found[name]))
    most = f"at most the smaller side of {name} {found[name]}"
    require(config.rank <= min(found[name]), "model.lora.rank", config.rank, most)
    return found


def merged(config: LoRAConfig, params: Adapted) -> optax.Params:
    """The parameters of the model: W + s A B for the targets, all others as they are."""
    factors = named_leaves(params.factors)

    def add(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        stem = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix(KERNEL)
        if stem + A not in factors:
            return leaf
        update = jnp.matmul(factors[stem + A], factors[stem + B], precision="highest")
        return leaf + config.scale * update

    return jax.tree_util.tree_map_with_path(add, params.base)


def on_host(model: ModelConfig, params: optax.Params | Adapted) -> optax.Params:
    """The parameters that a model reads as NumPy arrays, from those that a training state holds."""
    return jax.tree.map(np.asarray, merged(model.lora, params) if isinstance(params, Adapted) else params)


def for_factors(config: OptimizerConfig) -> OptimizerConfig:
    """The optimizer of the factors: groups of other parameters may match nothing."""
    if not isinstance(config, GroupedOptimizerConfig):
        return config
    return replace(config, groups=tuple(replace(group, optional=True) for group in config.groups))
