"""Modules that mix along the sequence, all with one contract.

    __call__(x [B, L, D], segment_ids, deterministic) -> y [B, L, D]   training and scoring
    init_state(batch_size, max_len)                   -> state         evaluates filters, once per generation
    prefill(state, x [B, T, D], lengths)              -> state, y      the next T tokens, from any state
    step(state, x [B, D])                             -> state, y      one token, exact from any state

`segment_ids` is None or [B, L]. `lengths` is None or [B]: row b of a fresh state's first prefill is then
right-aligned, and only its last lengths[b] tokens are real.

`Mixer` (mixer.py) has these four methods. A mixer derives from it and writes `setup` and one method,

    mix(x [B, T, D], seq, deterministic) -> y [B, T, D]

in which all that happens along the sequence are calls of `seq` (sequence.py), and everything else is token by
token. `seq` is `Parallel` (parallel.py) in `__call__`, and `Online` (online.py) in the other three. The state
is a `MixerState`; each leaf starts with B, except those in its field `shared`, which the batch shares.

A mixer may also declare

    is_unbounded(config) -> bool        a static method: whether decoding may continue beyond max_len
    filter                              a submodule of `hyena_jax.filters`, which distillation can replace

and mark the values that it mixes, of which `show` then draws the matrices: see mixing.py.

A module without `Mixer` may have the four methods itself, with its own kind of state; or `__call__` alone,
and decoding then recomputes its context. With a field `sequence_axis: str | None = None` its length can be
sharded, and with `platform: str | None = None` it is told what it is compiled for, "cpu", "gpu" or "tpu".

A decoding loop reduces the cost of a long convolution's steps to O(log(L)^2) by calling
`ops.online_conv.open_tiles` once and `absorb` after every `TILE` steps, both through `online.map_histories`.

>>> from hyena_jax.config import HyenaConfig
>>> mixer = Hyena(d_model=8, max_len=16, config=HyenaConfig(order=3))
>>> x = jax.random.normal(jax.random.key(0), (2, 11, 8))  # [B, L, D]
>>> params = mixer.init(jax.random.key(1), x)
>>> mixer.apply(params, x).shape
(2, 11, 8)
"""

import inspect
from collections.abc import Callable

import flax.linen as nn
import jax
import numpy as np

from hyena_jax.config import FILTER_CONFIGS, MIXER_CONFIGS, MixerConfig, Targets
from hyena_jax.mixers.aft import AFTConv, AFTFull, AFTLocal, AFTSimple
from hyena_jax.mixers.attention import Attention, LocalAttention
from hyena_jax.mixers.convolution import FIR, H3, S4D
from hyena_jax.mixers.fastmax import Fastmax
from hyena_jax.mixers.gated_delta import KDA, GatedDelta, GatedDelta2
from hyena_jax.mixers.hawk import Hawk
from hyena_jax.mixers.hyena import AnnotatedHyena, GatedHyena, Hyena
from hyena_jax.mixers.mamba import Mamba2, Mamba3
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.rwkv7 import RWKV7
from hyena_jax.mixers.sequence import Sequence

MIXERS = Targets(MIXER_CONFIGS)
"""The modules of all registered mixers, by name."""

__all__ = [
    "FIR",
    "H3",
    "KDA",
    "MIXERS",
    "RWKV7",
    "S4D",
    "AFTConv",
    "AFTFull",
    "AFTLocal",
    "AFTSimple",
    "AnnotatedHyena",
    "Attention",
    "Fastmax",
    "GatedDelta",
    "GatedDelta2",
    "GatedHyena",
    "Hawk",
    "Hyena",
    "LocalAttention",
    "Mamba2",
    "Mamba3",
    "Mixer",
    "Sequence",
    "decodes_by_state",
    "has_state",
    "is_unbounded",
    "mixer_class",
    "mixer_oracle",
]


def mixer_class(config: MixerConfig) -> type[nn.Module]:
    """The module of a mixer's config, with the fields (d_model, max_len, config, ...).

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
    """Whether decoding may continue beyond max_len: no state that grows, no table over absolute positions."""
    says = getattr(mixer_class(config), "is_unbounded", None)
    return says is not None and says(config)


def mixer_oracle(config: MixerConfig) -> Callable[..., np.ndarray] | None:
    """The mixer's float64 oracle (params, x, max_len, segment_ids=None, handed=None) -> y.

    `handed` is a dict, shared by the layers of a model, for what the first hands on to the others: see
    `Sequence.of_first_layer`. None if a part of the mixer has no oracle.
    """
    oracle = MIXER_CONFIGS.oracle(type(config))
    if oracle is None:
        return None
    options = {}
    if hasattr(config, "filter"):
        options["long_filter"] = FILTER_CONFIGS.oracle(type(config.filter))
        if options["long_filter"] is None:
            return None

    def y(
        params: dict,
        x: np.ndarray,
        max_len: int,
        segment_ids: np.ndarray | None = None,
        handed: dict[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        ids = np.zeros(x.shape[:2], np.int64) if segment_ids is None else np.asarray(segment_ids)
        ids = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)  # an id may come again
        if "handed" in inspect.signature(oracle).parameters:
            options["handed"] = {} if handed is None else handed
        params, x = jax.tree.map(np.float64, (params, x))
        return oracle(config, params, x, max_len, ids, **options)

    return y
