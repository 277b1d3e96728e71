"""A look into a trained model: mixing matrices, filters, gates, losses of tokens; arrays, figures and a page.

    run = hyena_jax.load_run("runs/mine")
    seen = trace(run.model, run.params, tokens)
    layer = seen.layers[0]
    own = mixing(layer.mixer, layer.own(run.params), layer.inputs, layer.handed)

`hyena-jax show` writes the page.
"""

from hyena_jax.inspect.figures import (
    draw_activations,
    draw_filters,
    draw_gates,
    draw_hankel,
    draw_losses,
    draw_mixing,
    draw_patches,
)
from hyena_jax.inspect.mixers import (
    Gates,
    effective_length,
    filters,
    gates,
    hankel_values,
    jacobian_norms,
    memory_lengths,
    mixing,
    plain_attention,
    spectrum,
    strength,
)
from hyena_jax.inspect.tracing import Activations, Layer, Trace, trace
from hyena_jax.mixers.mixing import Mixing

__all__ = [
    "Activations",
    "Gates",
    "Layer",
    "Mixing",
    "Trace",
    "draw_activations",
    "draw_filters",
    "draw_gates",
    "draw_hankel",
    "draw_losses",
    "draw_mixing",
    "draw_patches",
    "effective_length",
    "filters",
    "gates",
    "hankel_values",
    "jacobian_norms",
    "memory_lengths",
    "mixing",
    "plain_attention",
    "spectrum",
    "strength",
    "trace",
]
