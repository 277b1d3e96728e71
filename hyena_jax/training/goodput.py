"""How much of the devices' arithmetic a model's training needs, as its equations say."""

from dataclasses import replace
from typing import Any

import jax

from hyena_jax import models
from hyena_jax.config import Experiment, ModelConfig
from hyena_jax.ops.counts import Work, count
from hyena_jax.ops.layout import Layout
from hyena_jax.training.step import init_params

PASSES_OF_TRAINING = 3
"""The backward pass takes two products for each of the forward pass; nothing that is recomputed counts."""


def forward_work(config: ModelConfig, params: Any, inputs: Any) -> Work:
    """The work of a forward pass on arrays or shapes: transforms by n log n, as CPUs take them."""
    if hasattr(config, "remat"):
        config = replace(config, remat="none")
    model = models.build(config, None, Layout("cpu"))

    def forward(params: Any, inputs: jax.Array) -> jax.Array:
        return model.apply({"params": params}, inputs, None, True)

    return count(forward, params, inputs)


def flops_per_unit(experiment: Experiment, units_per_row: int) -> float:
    """FLOPs of products and transforms of training on a token or an image; 0 with LoRA, which trains factors.

    Model FLOPs as in PaLM (2204.02311, appendix B): three forward passes, whatever is recomputed.
    """
    config, n_rows = experiment.model, experiment.data.batch_size
    if getattr(getattr(config, "lora", None), "rank", None) is not None:
        return 0.0
    shape, dtype = config.input_row()
    if config.input_kind.is_tokens:
        shape = (getattr(experiment.data, "seq_len", shape[0]), *shape[1:])
    model = models.build(config)
    params = jax.eval_shape(lambda: init_params(model, experiment.seed))
    work = forward_work(config, params, jax.ShapeDtypeStruct((n_rows, *shape), dtype))
    return PASSES_OF_TRAINING * (work.products + work.transforms) / (n_rows * units_per_row)
