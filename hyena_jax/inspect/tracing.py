"""What happens inside a model for one input: each mixer with its input, and the sizes of activations.

Axes: B batch, L length, D channels.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from hyena_jax import models
from hyena_jax.config import MIXER_CONFIGS
from hyena_jax.mixers.sequence import Handed
from hyena_jax.models.blocks import Block


class Layer(NamedTuple):
    """A mixer of a model, and its input for one input of the model.

    Attributes:
      path: of the mixer in the model's parameters, such as ("blocks_0", "mixer").
      mixer: the mixer's module, unbound.
      inputs: x [B, L, D], after the norm in front of the mixer.
      handed: what earlier layers handed on to it: see `mixers.sequence.Sequence.of_first_layer`.
    """

    path: tuple[str, ...]
    mixer: nn.Module
    inputs: jax.Array
    handed: Handed = {}  # noqa: RUF012 - a pytree is never changed in place

    def own(self, params: optax.Params) -> optax.Params:
        """The mixer's own parameters among a model's; {} for a mixer without parameters."""
        for name in self.path:
            params = params.get(name, {})
        return params


class Activations(NamedTuple):
    """Root mean squares over the channels [B, L] in one block: its input, and what its parts add to it.

    Without a residual path a part's output replaces its input, and `mixer` and `mlp` are these outputs.
    """

    stream: jax.Array
    mixer: jax.Array
    mlp: jax.Array


class Trace(NamedTuple):
    """One pass through a model.

    Attributes:
      outputs: what the model returns, such as logits [B, L, V].
      layers: the model's mixers, in the order in which they ran.
      blocks: the activations of each residual block; empty for a model without `models.blocks.Block`.
      last: root mean square [B, L] of the last block's output; None without blocks.
    """

    outputs: jax.Array
    layers: tuple[Layer, ...]
    blocks: tuple[Activations, ...]
    last: jax.Array | None


def trace(model: nn.Module, params: optax.Params, inputs: jax.Array) -> Trace:
    """Runs a model once, without dropout, and keeps what passes through its mixers and blocks.

    Args:
      model: of `hyena_jax.models`, or a user's own that uses registered mixers.
      inputs: tokens [B, L] or images [B, height, width, colours].
    """
    if getattr(model.config, "remat", "none") != "none":  # it would wrap each block and hide its parts
        model = models.build(replace(model.config, remat="none"))
    mixers = tuple(MIXER_CONFIGS.target(config) for config in MIXER_CONFIGS.values())
    modules: list[tuple[tuple[str, ...], nn.Module]] = []

    @jax.jit
    def run(params: optax.Params, inputs: jax.Array) -> tuple:
        """The outputs, what each mixer gets, and the input and output of each half of a block."""
        mixed, halves = [], []

        def watch(
            method: Callable, args: tuple, kwargs: dict[str, Any], context: nn.module.InterceptorContext
        ) -> Any:
            handed, module = dict(kwargs.get("handed") or {}), context.module  # before the mixer adds to it
            y = method(*args, **kwargs)
            if isinstance(module, mixers) and context.method_name == "__call__":
                modules.append((module.path, module.clone(parent=None, name=None)))
                mixed.append((args[0], handed))
            if isinstance(module, Block) and context.method_name in ("mix", "feed_forward"):
                halves.append((args[0], y))
            return y

        with nn.intercept_methods(watch):
            outputs = model.apply({"params": params}, inputs)
        return outputs, mixed, halves

    outputs, mixed, halves = run(params, inputs)  # which is traced once, so that every mixer is listed once
    layers = tuple(Layer(*module, *given) for module, given in zip(modules, mixed, strict=True))
    adds = getattr(model.config, "residual", True)
    blocks = []
    for (x, middle), (_, y) in zip(halves[::2], halves[1::2], strict=True):
        parts = (middle - x, y - middle) if adds else (middle, y)
        blocks.append(Activations(*map(root_mean_square, (x, *parts))))
    return Trace(outputs, layers, tuple(blocks), root_mean_square(halves[-1][1]) if halves else None)


def root_mean_square(x: jax.Array) -> jax.Array:
    """[B, L] of x [B, L, D], over the channels; float32 at least."""
    return jnp.sqrt(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))).mean(axis=-1))
