"""The attention-free transformer's variants."""

import numpy as np

from cases.case import Case, D
from hyena_jax.config import AFTConvConfig, AFTFullConfig, AFTLocalConfig, AFTSimpleConfig
from hyena_jax.ops.aft import TAPS_EPS
from hyena_jax.reference import aft as reference


def aft_case(config) -> Case:
    def biases(params, length):
        """w [H, L, L]."""
        match config:
            case AFTSimpleConfig():
                return np.zeros((1, length, length))
            case AFTConvConfig():
                return reference.conv_biases(params, length, TAPS_EPS)
            case AFTLocalConfig():
                return reference.local_biases(params, length, config.window)[None]
            case AFTFullConfig():
                return reference.full_biases(params, length)[None]

    def resets(params, x, segment_ids):
        return reference.layer(params, x, biases(params, x.shape[1]), segment_ids)

    def oracle(params, x):
        return resets(params, x, np.zeros(x.shape[:2]))

    letters = {"H": getattr(config, "n_heads", 1), "K": getattr(config, "n_taps", 1)}
    return Case(config, oracle, letters | {"R": getattr(config, "rank", 1)}, resets=resets)


CASES = {
    "aft_simple": aft_case(AFTSimpleConfig()),
    "aft_conv": aft_case(AFTConvConfig(n_heads=2, n_taps=5)),
    "aft_local": aft_case(AFTLocalConfig(rank=3, window=20)),
    "aft_full": aft_case(AFTFullConfig(rank=3)),
}
OPTIONS = {
    "aft_simple_torch": aft_case(AFTSimpleConfig(init="torch")),
    "aft_conv_1_tap": aft_case(AFTConvConfig(n_heads=D, n_taps=1, init="xavier")),
    "aft_conv_more_taps_than_tokens": aft_case(AFTConvConfig(n_heads=1, n_taps=40)),
    "aft_local_window_1": aft_case(AFTLocalConfig(rank=2, window=1)),
    "aft_local_window_beyond_the_end": aft_case(AFTLocalConfig(rank=2, window=200, init="griffin")),
}
