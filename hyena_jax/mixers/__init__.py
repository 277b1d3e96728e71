"""Modules that mix along the sequence, all with one contract.

    __call__(x [B, L, D], segment_ids, deterministic) -> y [B, L, D]   training and scoring
    init_state(batch_size, max_len)                   -> state         evaluates filters, once per generation
    prefill(state, x [B, T, D], lengths)              -> state, y      the next T tokens, from any state
    step(state, x [B, D])                             -> state, y      one token, exact from any state

The state is a NamedTuple; each leaf starts with B, except those in its field `shared`, which the batch
shares. `segment_ids` is None or [B, L]. `lengths` is None or [B]: row b of a fresh state's first prefill
is then right-aligned, and only its last lengths[b] tokens are real.

A module without `init_state`, `prefill` and `step` trains and scores, and decoding recomputes its context.
A module may also declare:

    sequence_axis: str | None = None    a field: the mesh axis over which __call__ has L sharded
    platform: str | None = None         a field: of the devices that it is compiled for, "cpu", "gpu" or "tpu"
    is_unbounded(config) -> bool        a static method: whether decoding may continue beyond max_len
    filter                              a submodule of `hyena_jax.filters`, which distillation can replace
    mixing_matrix(x) -> Mixing | None   its matrices over time: see `mixing.py`

Mixers with long convolutions share the base class `long.LongConvolutionMixer`. A decoding loop reduces the
cost of their steps to O(log(L)^2) by calling `ops.online_conv.open_tiles` once and `absorb` after every
`TILE` steps, both through `long.map_histories`.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import numpy as np

from hyena_jax.config import FILTER_CONFIGS, MIXER_CONFIGS, MixerConfig, Targets
from hyena_jax.mixers.aft import AFTConv, AFTFull, AFTLocal, AFTSimple
from hyena_jax.mixers.annotated_hyena import AnnotatedHyena
from hyena_jax.mixers.attention import Attention, LocalAttention
from hyena_jax.mixers.fastmax import Fastmax
from hyena_jax.mixers.gated_delta import GatedDelta
from hyena_jax.mixers.gated_hyena import GatedHyena
from hyena_jax.mixers.h3 import H3
from hyena_jax.mixers.hawk import Hawk
from hyena_jax.mixers.hyena import Hyena
from hyena_jax.mixers.mamba2 import Mamba2
from hyena_jax.mixers.plain_convolution import FIR, S4D

MIXERS = Targets(MIXER_CONFIGS)
"""The modules of all registered mixers, by name."""

__all__ = [
    "FIR",
    "H3",
    "MIXERS",
    "S4D",
    "AFTConv",
    "AFTFull",
    "AFTLocal",
    "AFTSimple",
    "AnnotatedHyena",
    "Attention",
    "Fastmax",
    "GatedDelta",
    "GatedHyena",
    "Hawk",
    "Hyena",
    "LocalAttention",
    "Mamba2",
    "decodes_by_state",
    "has_state",
    "is_unbounded",
    "mixer_class",
    "mixer_oracle",
]


def mixer_class(config: MixerConfig) -> type[nn.Module]:
    """The module that a mixer's config describes; its fields are (d_model, max_len, config, ...).

    Raises:
      UserError: if the config's class is not registered.
    """
    return MIXER_CONFIGS.target(type(config))


def decodes_by_state(config: MixerConfig) -> bool:
    """Whether the mixer's module has `init_state`, `prefill` and `step`."""
    return has_state(mixer_class(config))


def has_state(module: type[nn.Module]) -> bool:
    """Whether a module, a mixer's or a model's, has `init_state`, `prefill` and `step`."""
    return all(callable(getattr(module, name, None)) for name in ("init_state", "prefill", "step"))


def is_unbounded(config: MixerConfig) -> bool:
    """Whether decoding may continue beyond max_len, as the mixer's module declares.

    Such a mixer has a state that does not grow with the sequence, and no table over absolute positions.
    """
    says = getattr(mixer_class(config), "is_unbounded", None)
    return says is not None and says(config)


def mixer_oracle(config: MixerConfig) -> Callable[..., np.ndarray] | None:
    """The mixer's float64 oracle (params, x, max_len, segment_ids=None) -> y; None if a part has none."""
    oracle = MIXER_CONFIGS.oracle(type(config))
    if oracle is None:
        return None
    options = {}
    if hasattr(config, "filter"):
        options["long_filter"] = FILTER_CONFIGS.oracle(type(config.filter))
        if options["long_filter"] is None:
            return None

    def y(params: dict, x: np.ndarray, max_len: int, segment_ids: np.ndarray | None = None) -> np.ndarray:
        ids = np.zeros(x.shape[:2]) if segment_ids is None else segment_ids
        params, x = jax.tree.map(np.float64, (params, x))
        return oracle(config, params, x, max_len, ids, **options)

    return y
