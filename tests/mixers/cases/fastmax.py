"""Fastmax attention."""

from cases.case import Case, make_case
from hyena_jax.config import FastmaxConfig


def fastmax_case(n_heads=2, **options) -> Case:
    # Not 4 heads of 2 channels: standardised, two channels are a sign, and bfloat16 flips it.
    return make_case(FastmaxConfig(n_heads, **options), letters={})


CASES = {"fastmax": fastmax_case()}
OPTIONS = {
    # Small scales keep the sums of weights of odd degrees away from 0, where rounding is magnified.
    "fastmax_p1": fastmax_case(p=1, scale=0.2),
    "fastmax_p3": fastmax_case(p=3, scale=0.2, init="torch"),
    "fastmax_p4": fastmax_case(p=4, qkv_bias=True, init="gpt2"),
    "fastmax_not_standardized": fastmax_case(standardize=False, n_heads=1, out_bias=False),
    "fastmax_quadratic": fastmax_case(factorized=False, init="griffin"),
    "fastmax_bidirectional": fastmax_case(causal=False),
    "fastmax_bidirectional_quadratic": fastmax_case(causal=False, factorized=False),
}
