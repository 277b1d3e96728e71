"""Inputs in the shapes of an experiment, for programs that are compiled or timed: their values do not matter.

Axes: B batch, L length.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.config import Experiment, ImagesConfig, ModelConfig, TextConfig, name_of
from hyena_jax.data.dataset import batches, fill_in, load
from hyena_jax.system.errors import require

# Height and width, colour channels and classes of the known images.
IMAGES = {"digits": ((8, 8), 1, 10), "mnist": ((28, 28), 1, 10), "cifar10": ((32, 32), 3, 10)}


class Examples(NamedTuple):
    """A complete experiment, and batches for its model at one or several lengths.

    Attributes:
      experiment: with the fields filled in that its model takes from its data.
      unit: what is predicted and counted: `token`, `image`.
      batches: functions that return `inputs` and `targets`, by length.
    """

    experiment: Experiment
    unit: str
    batches: dict[int, Callable[[], dict[str, jax.Array]]]


def examples_of(experiment: Experiment, seq_len: tuple[int, ...], vocab_size: int) -> Examples:
    """Random text or images for an experiment; other data is read.

    A folder of images is read only for sizes that the model lacks.

    Args:
      seq_len: lengths of text; empty: the experiment's.
      vocab_size: of a model that takes its vocabulary from its text.
    """
    rank = getattr(getattr(experiment.model, "lora", None), "rank", None)
    require(rank is None, "model.lora.rank", rank, "None: the step that trains all parameters is measured")
    match data := experiment.data:
        case TextConfig():
            return _random_text(experiment, seq_len, vocab_size)
        case ImagesConfig():
            without = f"absent with {data.inputs}"
            names, model = ("image_size", "channels", "n_classes"), experiment.model
            if data.path is None:
                experiment = fill_in(experiment, dict(zip(names, IMAGES[data.name], strict=True)))
            elif None in [getattr(model, name, 0) for name in names]:
                experiment = load(data).complete(experiment)
            model = experiment.model

            def pixels() -> dict[str, jax.Array]:
                inputs = random_inputs(model, data.batch_size, model.max_len)
                return {"inputs": inputs, "targets": jnp.zeros(data.batch_size, jnp.int32)}

            found = Examples(experiment, "image", {model.max_len: pixels})
        case _:
            without = f"absent with {name_of(data)}, which is read as it is"
            dataset = load(data)
            experiment = dataset.complete(experiment)
            batch = dict(next(batches(dataset, data.batch_size, experiment.seed))[1])
            shape = batch["inputs"].shape
            kind, most = experiment.model.input_kind, getattr(experiment.model, "max_len", None)
            length = most if most and not kind.is_tokens else shape[1] if len(shape) > 1 else 1
            found = Examples(experiment, dataset.unit, {length: lambda: batch})
    require(not seq_len, "seq_len", seq_len, without)
    return found


def _random_text(experiment: Experiment, seq_len: tuple[int, ...], vocab_size: int) -> Examples:
    model, batch_size = experiment.model, experiment.data.batch_size
    if getattr(model, "vocab_size", 0) is None:
        model = replace(model, vocab_size=vocab_size)
    longest = model.input_row()[0][0]
    for length in seq_len:
        require(length <= longest, "seq_len", length, f"at most model.max_len={longest}")

    def batch(length: int) -> dict[str, jax.Array]:
        tokens = random_inputs(model, batch_size, length)
        return {"inputs": tokens, "targets": tokens}

    lengths = tuple(sorted(seq_len)) or (experiment.data.seq_len,)
    batches = {length: partial(batch, length) for length in lengths}
    return Examples(replace(experiment, model=model), "token", batches)


def random_inputs(config: ModelConfig, batch_size: int, length: int) -> jax.Array:
    """Random tokens int32 [B, L], or other inputs of the model, such as images, in their one shape."""
    shape, dtype = config.input_row()
    if config.input_kind.is_tokens:
        shape = (length, *shape[1:])
    if jnp.issubdtype(dtype, jnp.integer):
        # Without a vocabulary size: 0 and 1 are valid for every model that reads integers.
        most = getattr(config, "vocab_size", None) or 2
        return jax.random.randint(jax.random.key(0), (batch_size, *shape), 0, most, dtype)
    return jax.random.normal(jax.random.key(0), (batch_size, *shape), dtype)
