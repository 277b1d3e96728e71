"""Modules that produce long filters, all with one contract.

    Filter(n_filters, d_model, max_len, config)(length) -> h [N, D, length]

for any length up to max_len, where h at a length is the first `length` taps of h at max_len. A filter that is
the impulse response of a small recurrence has a method `recurrence() -> Modes`, and decoding runs it.
"""

import flax.linen as nn

from hyena_jax.config import FILTER_CONFIGS, FilterConfig, Targets
from hyena_jax.config.checks import require_sizes
from hyena_jax.filters.explicit import ExplicitFilter, ShortFilter, WindowedFilter
from hyena_jax.filters.implicit import CKConvFilter, ImplicitFilter, LookupFilter, SirenFilter
from hyena_jax.filters.spectral import FNOFilter, STUFilter, TransferFunctionFilter
from hyena_jax.filters.state_space import ModalFilter, RealModalFilter, S4DFilter
from hyena_jax.ops.modal_conv import Modes

FILTERS = Targets(FILTER_CONFIGS)
"""The modules of all registered filters, by name."""

__all__ = [
    "FILTERS",
    "CKConvFilter",
    "ExplicitFilter",
    "FNOFilter",
    "ImplicitFilter",
    "LookupFilter",
    "ModalFilter",
    "Modes",
    "RealModalFilter",
    "S4DFilter",
    "STUFilter",
    "ShortFilter",
    "SirenFilter",
    "TransferFunctionFilter",
    "WindowedFilter",
    "build_filter",
    "filter_class",
    "has_constant_state",
]


def build_filter(n_filters: int, d_model: int, max_len: int, config: FilterConfig) -> nn.Module:
    """The module that a filter's config describes."""
    require_sizes(d_model, max_len)
    return filter_class(config)(n_filters, d_model, max_len, config)


def filter_class(config: FilterConfig) -> type[nn.Module]:
    """The module of a filter's config. Raises UserError if the config's class is not registered."""
    return FILTER_CONFIGS.target(type(config))


def has_constant_state(config: FilterConfig) -> bool:
    """Whether decoding needs a state that does not grow: a filter of few taps, or of a small recurrence."""
    return config.reach is not None or callable(getattr(filter_class(config), "recurrence", None))
