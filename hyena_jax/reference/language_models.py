"""Whole language models of one kind of mixer, from tokens to logits: nothing but NumPy.

Axes: B batch, L length, V vocabulary. Arguments as in `reference.models`; a config's pattern has one mixer.
"""

import numpy as np

from hyena_jax.reference import filters, models, recurrence
from hyena_jax.reference import hyena as hyena_forms


def hyena(params: dict, tokens: np.ndarray, config) -> np.ndarray:
    """Logits [B, L, V] of Hyena with implicit filters (Poli et al. 2023, arXiv 2302.10866)."""
    return _logits(params, tokens, config, hyena_forms.hyena, long_filter=filters.implicit)


def annotated_hyena(params: dict, tokens: np.ndarray, config) -> np.ndarray:
    """Logits [B, L, V] of the annotated variant, with its windowed filters."""
    return _logits(params, tokens, config, hyena_forms.annotated_hyena, long_filter=filters.windowed)


def gated_hyena(params: dict, tokens: np.ndarray, config) -> np.ndarray:
    """Logits [B, L, V] of the gated variant, with its filters from a table."""
    return _logits(params, tokens, config, hyena_forms.gated_hyena, long_filter=filters.lookup)


def hawk(params: dict, tokens: np.ndarray, config) -> np.ndarray:
    """Logits [B, L, V] of Hawk (De et al. 2024, arXiv 2402.19427)."""
    return _logits(params, tokens, config, recurrence.hawk)


def _logits(params: dict, tokens: np.ndarray, config, oracle, **long_filter) -> np.ndarray:
    (mixer_config,) = config.pattern
    one_document = np.zeros(np.shape(tokens))

    def mixer(params: dict, x: np.ndarray) -> np.ndarray:
        return oracle(mixer_config, params, x, config.max_len, one_document, **long_filter)

    return models.language_model(params, tokens, config, [mixer])
