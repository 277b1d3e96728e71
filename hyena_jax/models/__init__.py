"""Models, and the one place where a config becomes a module.

    Module(config)
    __call__(inputs, segment_ids, deterministic) -> logits

`segment_ids` is None, or [B, L] for models that keep documents apart. With `deterministic` False, dropout is
applied, from the RNG stream `dropout`.

Optional, and not used if the module lacks it:

    hidden(inputs, segment_ids, deterministic) -> x     } the loss then computes logits part by part
    logits(x) -> logits                                 }
    init_state, prefill, step                           the mixer contract, with tokens in and logits out, and
                                                        prefill(state, tokens, lengths, last_only), which may
                                                        return the last logits alone if the last argument is
                                                        True; else decoding recomputes the context
    is_unbounded                                        a property: decoding may continue beyond max_len
    sequence_axis: str | None = None                    a field: the mesh axis over which L is sharded
    layout: Layout = Layout()                           a field: the devices that the model is compiled for
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax import mixers
from hyena_jax.config import MODEL_CONFIGS, MixerConfig, ModelConfig, plugins_in
from hyena_jax.mixers import consistency
from hyena_jax.models.autoencoder import Autoencoder
from hyena_jax.models.blocks import sequence_layout
from hyena_jax.models.image_classifier import ImageClassifier
from hyena_jax.models.language_model import LanguageModel
from hyena_jax.ops.forms import Layout
from hyena_jax.ops.kernels.check import usable
from hyena_jax.system.errors import require

__all__ = [
    "Autoencoder",
    "ImageClassifier",
    "LanguageModel",
    "build",
    "check_consistency",
    "check_decoding",
    "decodes_by_state",
    "example_inputs",
    "gather_outside_blocks",
    "has_hidden",
    "is_unbounded",
    "lacks",
    "without_blocks",
    "without_state",
]

# What the names of the blocks' parameters start with.
BLOCKS = "blocks_"
# Fields that a config may leave to the data, and that must be known when a model is built.
SIZES_OF_THE_DATA = ("vocab_size", "image_size", "channels", "n_classes")


def build(config: ModelConfig, sequence_axis: str | None = None, layout: Layout | None = None) -> nn.Module:
    """The module that `config` describes.

    Args:
      sequence_axis: axis of the ambient mesh (`jax.set_mesh`) over which L is sharded in calls, or None. The
        parameters do not depend on it.
      layout: the devices that the model is compiled for; None: JAX's default backend, and no mesh.

    Raises:
      ValueError: if the config's class is not registered; if vocab_size, image_size, channels or n_classes is
        None (training takes them from the data); or if a module cannot shard its length over sequence_axis.
    """
    require(isinstance(config, ModelConfig), "config", config, "a ModelConfig")
    module = MODEL_CONFIGS.target(type(config))
    for name in SIZES_OF_THE_DATA:
        require(getattr(config, name, 0) is not None, name, None, "known when a model is built")
    fields, options = module.__dataclass_fields__, {}
    if "layout" in fields:
        if layout is None:
            backend = jax.default_backend()
            layout = Layout(backend, kernels=backend == "tpu" and usable(backend))
        options["layout"] = layout
    if sequence_axis is not None:
        can = "sequence_axis" in fields
        require(can, "sequence_axis", sequence_axis, f"None for a model of {type(config).__name__}")
        for mixer in getattr(config, "pattern", ()):
            sequence_layout(mixer, sequence_axis)
        options["sequence_axis"] = sequence_axis
    return module(config, **options)


def example_inputs(config: ModelConfig, batch_size: int = 1) -> jax.Array:
    """Zeros of the longest shape that a model of `config` reads, [batch_size, ...]."""
    shape, dtype = config.input_row()
    return jnp.zeros((batch_size, *shape), dtype)


def has_hidden(model: nn.Module) -> bool:
    """Whether a model has `hidden` and `logits`, which `__call__` applies one after the other."""
    return all(callable(getattr(type(model), name, None)) for name in ("hidden", "logits"))


def gather_outside_blocks(layout: Layout, params: Any) -> Any:
    """The parameters, with those outside of blocks gathered on every device; each block gathers its own."""
    return {
        name: value if name.startswith(BLOCKS) else layout.gather(value) for name, value in params.items()
    }


def without_blocks(params: Any) -> Any:
    """The parameters outside of blocks."""
    return {name: value for name, value in params.items() if not name.startswith(BLOCKS)}


def without_state(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules, the model's and its mixers', that lack `init_state`, `prefill` or `step`."""
    return _modules_without(mixers.has_state, model)


def decodes_by_state(model: nn.Module) -> bool:
    """Whether a model, and each of its mixers, has `init_state`, `prefill` and `step`."""
    return not without_state(model)


def check_decoding(model: nn.Module, params: Any) -> None:
    """Traces a state, a prefill and a step of a model of tokens that decodes by state.

    Raises:
      UserError: if prefill or step does not return a state like the one before, and logits.
    """
    size, vocabulary = 2, model.config.vocab_size

    def run(params: Any) -> tuple:
        bound = model.bind({"params": params})
        state = bound.init_state(size, model.config.max_len)
        tokens = jnp.zeros((size, 1), jnp.int32)
        read, logits = bound.prefill(state, tokens, jnp.ones(size, jnp.int32), False)
        after, last = bound.step(read, tokens[:, 0])
        return state, (read, logits), (after, last)

    state, *results = jax.eval_shape(run, params)
    for (after, logits), name, shape in zip(results, ("prefill", "step"), ((size, 1), (size,)), strict=True):
        what, allowed = f"the state that {name} returns", "like the one before: structure, shapes, dtypes"
        require(jax.tree.structure(after) == jax.tree.structure(state), what, "another structure", allowed)
        for path, leaf in jax.tree.leaves_with_path(after):
            old = dict(jax.tree.leaves_with_path(state))[path]
            found = f"{leaf.dtype} {leaf.shape} after {old.dtype} {old.shape}"
            require((leaf.shape, leaf.dtype) == (old.shape, old.dtype), what, found, allowed)
        expected = (*shape, vocabulary)
        require(logits.shape == expected, f"the logits of {name}", logits.shape, f"of shape {expected}")


def check_consistency(config: ModelConfig) -> None:
    """`mixers.consistency.check_consistency` of each mixer with a part that is not this package's."""
    for mixer in dict.fromkeys(getattr(config, "pattern", ())):
        if isinstance(mixer, MixerConfig) and plugins_in(mixer):
            module = mixers.mixer_class(mixer)
            consistency.check_consistency(module(config.d_model, config.max_len, mixer, config.n_layers))


def is_unbounded(model: nn.Module) -> bool:
    """Whether decoding by state may continue beyond max_len, with a state that does not grow."""
    return decodes_by_state(model) and getattr(model, "is_unbounded", False)


def lacks(model: nn.Module) -> list[str]:
    """The optional parts of the contract above that a model of tokens lacks, each with its consequence."""
    found = []
    if names := without_state(model):
        found.append(f"decoding state ({', '.join(names)}): generate recomputes the context for every token")
    if not has_hidden(model):
        found.append("hidden and logits: the loss holds the logits of all targets at once")
    if names := _modules_without(lambda module: "sequence_axis" in module.__dataclass_fields__, model):
        found.append(f"sequence_axis ({', '.join(names)}): parallel.sequence must be 1")
    return found


def _modules_without(has: Callable[[type[nn.Module]], bool], model: nn.Module) -> tuple[str, ...]:
    """Names of the modules, the model's and its mixers', of which `has` is False."""
    pattern = [part for part in getattr(model.config, "pattern", ()) if isinstance(part, MixerConfig)]
    modules = [type(model), *map(mixers.mixer_class, pattern)]
    return tuple(dict.fromkeys(module.__name__ for module in modules if not has(module)))
