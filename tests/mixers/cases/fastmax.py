"""Fastmax attention."""

import numpy as np

from cases.case import Case
from hyena_jax.config import FastmaxConfig
from hyena_jax.ops.fastmax import LEAST_WEIGHT, STANDARDIZE_EPS
from hyena_jax.reference import fastmax as reference


def fastmax_case(n_heads=2, **options) -> Case:
    # Not 4 heads of 2 channels: standardised, two channels are a sign, and bfloat16 flips it.
    config = FastmaxConfig(n_heads, **options)

    def resets(params, x, segment_ids):
        return reference.attention(params, x, config, segment_ids, STANDARDIZE_EPS, LEAST_WEIGHT)

    def oracle(params, x):
        return resets(params, x, np.zeros(x.shape[:2]))

    return Case(config, oracle, letters={}, resets=resets)


CASES = {"fastmax": fastmax_case()}
OPTIONS = {
    # Small scales keep the sums of weights of odd degrees far from 0, where any rounding is magnified.
    "fastmax_p1": fastmax_case(p=1, scale=0.2),
    "fastmax_p3": fastmax_case(p=3, scale=0.2, init="torch"),
    "fastmax_p4": fastmax_case(p=4, qkv_bias=True, init="gpt2"),
    "fastmax_not_standardized": fastmax_case(standardize=False, n_heads=1, out_bias=False),
    "fastmax_quadratic": fastmax_case(factorized=False, init="griffin"),
    "fastmax_bidirectional": fastmax_case(causal=False),
    "fastmax_bidirectional_quadratic": fastmax_case(causal=False, factorized=False),
}
