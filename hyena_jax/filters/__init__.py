"""Modules that produce long filters, all with one contract.

    Filter(n_filters, d_model, max_len, config)(length) -> h [N, D, length]

for any length up to max_len; h at a length is the first taps of h at max_len.
"""

import flax.linen as nn

from hyena_jax.config import FILTER_CONFIGS, FilterConfig
from hyena_jax.config.checks import require_sizes
from hyena_jax.filters.explicit import ExplicitFilter, WindowedFilter
from hyena_jax.filters.implicit import CKConvFilter, ImplicitFilter
from hyena_jax.filters.lookup import LookupFilter
from hyena_jax.filters.spectral import FNOFilter, TransferFunctionFilter
from hyena_jax.filters.state_space import ModalFilter, S4DFilter

FILTERS: dict[str, type[nn.Module]] = {
    "implicit": ImplicitFilter,
    "windowed": WindowedFilter,
    "explicit": ExplicitFilter,
    "ckconv": CKConvFilter,
    "fno": FNOFilter,
    "transfer_function": TransferFunctionFilter,
    "s4d": S4DFilter,
    "modal": ModalFilter,
    "lookup": LookupFilter,
}

__all__ = [
    "FILTERS",
    "CKConvFilter",
    "ExplicitFilter",
    "FNOFilter",
    "ImplicitFilter",
    "LookupFilter",
    "ModalFilter",
    "S4DFilter",
    "TransferFunctionFilter",
    "WindowedFilter",
    "build_filter",
]


def build_filter(n_filters: int, d_model: int, max_len: int, config: FilterConfig) -> nn.Module:
    """The module that a filter's config describes."""
    require_sizes(d_model, max_len)
    by_config = {FILTER_CONFIGS[name]: module for name, module in FILTERS.items()}
    return by_config[type(config)](n_filters, d_model, max_len, config)
