"""The sizes of a model: its parameters, and the state that it keeps for each sequence."""

import math

import jax

from hyena_jax import models
from hyena_jax.config import ModelConfig
from hyena_jax.training.step import init_params


def n_params(config: ModelConfig) -> int:
    """The number of parameters."""
    model = models.build(config)
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def state_size(config: ModelConfig) -> int | None:
    """The bytes of decoding state that a sequence of `max_len` tokens takes; None without such a state.

    What all sequences share, such as evaluated filters, does not count.
    """
    model = models.build(config)
    if not config.input_kind.is_tokens or not models.decodes_by_state(model):
        return None
    shapes = jax.eval_shape(lambda: init_params(model, 0))

    def size(batch_size: int) -> int:
        state = jax.eval_shape(
            lambda params: model.apply({"params": params}, batch_size, config.max_len, method="init_state"),
            shapes,
        )
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    return size(2) - size(1)
