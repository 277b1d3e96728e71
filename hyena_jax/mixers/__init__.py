"""Modules that mix along the sequence, all with one contract.

    __call__(x [B, L, D], segment_ids, deterministic) -> y [B, L, D]   training and scoring
    init_state(batch_size, max_len)                   -> state         evaluates filters, once a generation
    prefill(state, x [B, T, D], lengths)              -> state, y      continues from any state by T tokens
    step(state, x [B, D])                             -> state, y      one token, exact from any state

The state is a NamedTuple; each leaf starts with B, except those in its field `shared`, which the batch
shares. `segment_ids` is None or [B, L]. `lengths` is None or [B]: row b of a fresh state's first prefill
is then right-aligned, and only its last lengths[b] tokens are real.

A decoding loop may call `long_memory.open_tiles` on a state, and `long_memory.absorb` after every
`ops.online_conv.TILE` steps: steps of long filters then take O(log(L)^2), and no mixer needs to know.
"""

import flax.linen as nn

from hyena_jax.config import MIXER_CONFIGS, MixerConfig
from hyena_jax.mixers.aft import AFTFull, AFTSimple
from hyena_jax.mixers.aft_windowed import AFTConv, AFTLocal
from hyena_jax.mixers.annotated_hyena import AnnotatedHyena
from hyena_jax.mixers.attention import Attention
from hyena_jax.mixers.convolution import FIR, S4D
from hyena_jax.mixers.fastmax import Fastmax
from hyena_jax.mixers.gated_hyena import GatedHyena
from hyena_jax.mixers.h3 import H3
from hyena_jax.mixers.hawk import Hawk
from hyena_jax.mixers.hyena import Hyena
from hyena_jax.mixers.local_attention import LocalAttention

MIXERS: dict[str, type[nn.Module]] = {
    "hyena": Hyena,
    "annotated_hyena": AnnotatedHyena,
    "gated_hyena": GatedHyena,
    "hawk": Hawk,
    "attention": Attention,
    "local_attention": LocalAttention,
    "fastmax": Fastmax,
    "aft_full": AFTFull,
    "aft_local": AFTLocal,
    "aft_simple": AFTSimple,
    "aft_conv": AFTConv,
    "h3": H3,
    "s4d": S4D,
    "fir": FIR,
}

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
    "GatedHyena",
    "Hawk",
    "Hyena",
    "LocalAttention",
    "mixer_class",
]


def mixer_class(config: MixerConfig) -> type[nn.Module]:
    """The module that a mixer's config describes; its fields are (d_model, max_len, config, ...)."""
    by_config = {MIXER_CONFIGS[name]: module for name, module in MIXERS.items()}
    return by_config[type(config)]
