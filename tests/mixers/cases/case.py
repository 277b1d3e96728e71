"""A case of the contract test."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from hyena_jax.config import MixerConfig
from hyena_jax.mixers import mixer_oracle

# Small, with an odd Lmax of at least every length in the tests.
D, MAX_LEN = 8, 127


class Case(NamedTuple):
    """A mixer's config, its NumPy float64 oracle, and properties of its arithmetic."""

    config: MixerConfig
    oracle: Callable[[dict, np.ndarray], np.ndarray]
    """(params, x [B, L, D]) -> y [B, L, D]."""
    letters: dict[str, int]
    """Sizes that the shapes in the mixer's docstring are written in, besides D and Lmax."""
    exactly_causal: bool = True
    """No FFT in between, through which rounding reaches backwards."""
    through_library: bool = False
    """jax.nn.dot_product_attention mixes dtypes by design, also in its derivative."""
    is_sensitive: bool = False
    """Rounding the parameters and the input to bfloat16 moves the float64 oracle itself by 2% and more of its
    largest output: erasing with strengths of up to 2 in a few heads turns a memory again and again."""
    resets: Callable[[dict, np.ndarray, np.ndarray], np.ndarray] | None = None
    """The oracle with document boundaries: (params, x, segment_ids [B, L]) -> y; None where it has none."""
    max_len: int = MAX_LEN
    module: type | None = None
    """Another module than that of the config: a test's way to run one of its forms."""


def make_case(
    config: MixerConfig,
    letters: dict[str, int],
    max_len: int = MAX_LEN,
    handed: Callable[[np.ndarray], dict[str, np.ndarray]] = lambda x: {},
    **special: Any,
) -> Case:
    """The case of a config, with its oracle; `special` are fields of `Case` about its arithmetic.

    `handed` is what earlier layers hand on, a function of x token by token.
    """

    def found():
        oracle = mixer_oracle(config)
        return pytest.skip(f"{type(config).__name__} has no oracle") if oracle is None else oracle

    def oracle(params, x):
        return found()(params, x, max_len, None, handed(x))

    def resets(params, x, segment_ids):
        return found()(params, x, max_len, segment_ids, handed(x))

    has_few_taps = hasattr(config, "filter") and config.filter.reach and getattr(config, "n_blocks", 1) == 1
    knows_documents = not hasattr(config, "filter") or has_few_taps
    return Case(
        config, oracle, letters, resets=resets if knows_documents else None, max_len=max_len, **special
    )
