"""The oracle of every mixer, by the mixer's name: what its module computes, in NumPy float64.

Each returns y [B, L, D] for

    config       the mixer's config; only its fields are read
    params       nested dictionaries of the mixer's module, as NumPy arrays
    x            [B, L, D]
    max_len      Lmax, the length that long filters are defined for
    segment_ids  [B, L], a different id for each document
    long_filter  the oracle of the filter in `config`, for mixers with a long filter

Axes: B batch, L length, D channels, N filters.
"""

import numpy as np

from hyena_jax.reference import aft as aft_forms
from hyena_jax.reference import attention as attention_forms
from hyena_jax.reference import delta_rule, recurrence
from hyena_jax.reference import fastmax as fastmax_forms
from hyena_jax.reference import hyena as hyena_forms

# Constants of the definitions that are not options.
AFT_TAPS_EPS = 1e-8
FASTMAX_STANDARDIZE_EPS = 1e-5
FASTMAX_LEAST_WEIGHT = 1e-3
GATED_DELTA_LENGTH_EPS = 1e-6


def _each_document_alone(oracle):
    """The oracle, called for each run of equal segment_ids [B, L] by itself."""

    def y(config, params, x, max_len, segment_ids, long_filter) -> np.ndarray:
        if (segment_ids == segment_ids[:, :1]).all():
            return oracle(config, params, x, max_len, segment_ids, long_filter)
        rows = []
        for row, ids in zip(x, segment_ids, strict=True):
            starts = np.flatnonzero(np.diff(ids)) + 1
            parts = np.split(row[None], starts, axis=1)
            outputs = [oracle(config, params, part, max_len, None, long_filter) for part in parts]
            rows.append(np.concatenate(outputs, axis=1))
        return np.concatenate(rows)

    return y


@_each_document_alone
def hyena(config, params, x, max_len, segment_ids, long_filter) -> np.ndarray:
    """See `hyena_jax.reference.hyena.hyena`."""
    count = (config.order - (config.gating == "gate_first")) * (1 + config.bidirectional)
    h = long_filter(params["filter"], count, x.shape[1], max_len, config.filter)
    return hyena_forms.hyena(params, x, h, config, max_len)


@_each_document_alone
def annotated_hyena(config, params, x, max_len, segment_ids, long_filter) -> np.ndarray:
    """See `hyena_jax.reference.hyena.annotated_hyena`."""
    h = long_filter(params["filter"], config.order, x.shape[1], max_len, config.filter)
    return hyena_forms.annotated_hyena(params, x, h)


@_each_document_alone
def gated_hyena(config, params, x, max_len, segment_ids, long_filter) -> np.ndarray:
    """See `hyena_jax.reference.hyena.gated_hyena`."""
    h = long_filter(params["filter"], 1, x.shape[1], max_len, config.filter)
    return hyena_forms.gated_hyena(params, x, h, config.causal)


@_each_document_alone
def h3(config, params, x, max_len, segment_ids, long_filter) -> np.ndarray:
    """See `hyena_jax.reference.hyena.h3`."""
    h = long_filter(params["filter"], 1, x.shape[1], max_len, config.filter)
    return hyena_forms.h3(params, x, h, config.head_dim)


@_each_document_alone
def s4d(config, params, x, max_len, segment_ids, long_filter) -> np.ndarray:
    """See `hyena_jax.reference.hyena.s4d`."""
    return hyena_forms.s4d(params, x, long_filter(params["filter"], 1, x.shape[1], max_len, config.filter))


@_each_document_alone
def fir(config, params, x, max_len, segment_ids, long_filter) -> np.ndarray:
    """See `hyena_jax.reference.hyena.fir`."""
    return hyena_forms.fir(params, x, long_filter(params["filter"], 1, x.shape[1], max_len, config.filter))


def hawk(config, params, x, max_len, segment_ids) -> np.ndarray:
    """See `hyena_jax.reference.recurrence.hawk`."""
    return recurrence.hawk(params, x, config, segment_ids)


def gated_delta(config, params, x, max_len, segment_ids) -> np.ndarray:
    """See `hyena_jax.reference.delta_rule.gated_delta`."""
    return delta_rule.gated_delta(params, x, config, segment_ids, GATED_DELTA_LENGTH_EPS)


def mamba2(config, params, x, max_len, segment_ids) -> np.ndarray:
    """See `hyena_jax.reference.delta_rule.mamba2`."""
    return delta_rule.mamba2(params, x, config, segment_ids)


def attention(config, params, x, max_len, segment_ids) -> np.ndarray:
    """See `hyena_jax.reference.attention.attention`."""
    return attention_forms.attention(params, x, config, segment_ids)


def local_attention(config, params, x, max_len, segment_ids) -> np.ndarray:
    """See `hyena_jax.reference.attention.attention`."""
    return attention_forms.attention(params, x, config, segment_ids, config.window)


def fastmax(config, params, x, max_len, segment_ids) -> np.ndarray:
    """See `hyena_jax.reference.fastmax.attention`."""
    constants = FASTMAX_STANDARDIZE_EPS, FASTMAX_LEAST_WEIGHT
    return fastmax_forms.attention(params, x, config, segment_ids, *constants)


def aft_simple(config, params, x, max_len, segment_ids) -> np.ndarray:
    """See `hyena_jax.reference.aft.layer`; all position biases are 0."""
    return aft_forms.layer(params, x, np.zeros((1, x.shape[1], x.shape[1])), segment_ids)


def aft_conv(config, params, x, max_len, segment_ids) -> np.ndarray:
    """See `hyena_jax.reference.aft.layer`."""
    return aft_forms.layer(params, x, aft_forms.conv_biases(params, x.shape[1], AFT_TAPS_EPS), segment_ids)


def aft_local(config, params, x, max_len, segment_ids) -> np.ndarray:
    """See `hyena_jax.reference.aft.layer`."""
    biases = aft_forms.local_biases(params, x.shape[1], config.window)
    return aft_forms.layer(params, x, biases[None], segment_ids)


def aft_full(config, params, x, max_len, segment_ids) -> np.ndarray:
    """See `hyena_jax.reference.aft.layer`."""
    return aft_forms.layer(params, x, aft_forms.full_biases(params, x.shape[1])[None], segment_ids)
