"""The oracle of every mixer: what its module computes, in NumPy float64, for its config and its parameters.

Configs are known by the names of their classes and read by their fields alone. Axes: B batch, L length, D
channels, N filters.
"""

import numpy as np

from hyena_jax.reference import aft, attention, fastmax, filters, hyena, recurrence

# Constants of the definitions that are no options.
AFT_TAPS_EPS = 1e-8
FASTMAX_STANDARDIZE_EPS = 1e-5
FASTMAX_LEAST_WEIGHT = 1e-3

FILTERS = {
    "ImplicitFilterConfig": filters.implicit,
    "WindowedFilterConfig": filters.windowed,
    "ExplicitFilterConfig": filters.explicit,
    "CKConvFilterConfig": filters.ckconv,
    "FNOFilterConfig": filters.fno,
    "TransferFunctionFilterConfig": filters.transfer_function,
    "S4DFilterConfig": filters.s4d,
    "ModalFilterConfig": filters.modal,
    "LookupFilterConfig": filters.lookup,
}


def mixer(
    config, params: dict, x: np.ndarray, max_len: int, segment_ids: np.ndarray | None = None
) -> np.ndarray:
    """y [B, L, D] of the mixer that `config` describes, for x [B, L, D].

    Args:
      config: any of `hyena_jax.config.MIXER_CONFIGS`.
      params: nested dictionaries of the module of that config, as NumPy arrays.
      max_len: Lmax, which long filters are defined by.
      segment_ids: [B, L], each document with an id of its own; None is one document a row. Only mixers
        without long filters know documents.
    """
    name = type(config).__name__
    if name in WITH_LONG_FILTERS:
        return WITH_LONG_FILTERS[name](config, params, x, max_len)
    ids = np.zeros(x.shape[:2]) if segment_ids is None else segment_ids
    return WITH_DOCUMENTS[name](config, params, x, ids)


def long_filter(config, params: dict, n_filters: int, length: int, max_len: int) -> np.ndarray:
    """h [N, D, length] of the filter in a mixer's `config`."""
    function = FILTERS[type(config.filter).__name__]
    return function(params["filter"], n_filters, length, max_len, config.filter)


def _hyena(config, params: dict, x: np.ndarray, max_len: int) -> np.ndarray:
    count = config.order - (config.gating == "gate_first")
    h = long_filter(config, params, count * (1 + config.bidirectional), x.shape[1], max_len)
    return hyena.hyena(params, x, h, config, max_len)


def _annotated_hyena(config, params: dict, x: np.ndarray, max_len: int) -> np.ndarray:
    return hyena.annotated_hyena(params, x, long_filter(config, params, config.order, x.shape[1], max_len))


def _gated_hyena(config, params: dict, x: np.ndarray, max_len: int) -> np.ndarray:
    return hyena.gated_hyena(params, x, long_filter(config, params, 1, x.shape[1], max_len), config.causal)


def _h3(config, params: dict, x: np.ndarray, max_len: int) -> np.ndarray:
    return hyena.h3(params, x, long_filter(config, params, 1, x.shape[1], max_len), config.head_dim)


def _s4d(config, params: dict, x: np.ndarray, max_len: int) -> np.ndarray:
    return hyena.s4d(params, x, long_filter(config, params, 1, x.shape[1], max_len))


def _fir(config, params: dict, x: np.ndarray, max_len: int) -> np.ndarray:
    return hyena.fir(params, x, long_filter(config, params, 1, x.shape[1], max_len))


def _hawk(config, params: dict, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return recurrence.hawk(params, x, config, ids)


def _attention(config, params: dict, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return attention.attention(params, x, config, ids)


def _local_attention(config, params: dict, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return attention.attention(params, x, config, ids, config.window)


def _fastmax(config, params: dict, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return fastmax.attention(params, x, config, ids, FASTMAX_STANDARDIZE_EPS, FASTMAX_LEAST_WEIGHT)


def _aft_simple(config, params: dict, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return aft.layer(params, x, np.zeros((1, x.shape[1], x.shape[1])), ids)


def _aft_conv(config, params: dict, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return aft.layer(params, x, aft.conv_biases(params, x.shape[1], AFT_TAPS_EPS), ids)


def _aft_local(config, params: dict, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return aft.layer(params, x, aft.local_biases(params, x.shape[1], config.window)[None], ids)


def _aft_full(config, params: dict, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return aft.layer(params, x, aft.full_biases(params, x.shape[1])[None], ids)


WITH_LONG_FILTERS = {
    "HyenaConfig": _hyena,
    "AnnotatedHyenaConfig": _annotated_hyena,
    "GatedHyenaConfig": _gated_hyena,
    "H3Config": _h3,
    "S4DConfig": _s4d,
    "FIRConfig": _fir,
}
WITH_DOCUMENTS = {
    "HawkConfig": _hawk,
    "AttentionConfig": _attention,
    "LocalAttentionConfig": _local_attention,
    "FastmaxConfig": _fastmax,
    "AFTSimpleConfig": _aft_simple,
    "AFTConvConfig": _aft_conv,
    "AFTLocalConfig": _aft_local,
    "AFTFullConfig": _aft_full,
}
