"""Softmax attention."""

import numpy as np

from cases.case import Case
from hyena_jax.config import AttentionConfig
from hyena_jax.reference import attention as reference


def attention_case(n_heads: int) -> Case:
    def oracle(params, x):
        return reference.attention(params, x, n_heads, np.zeros(x.shape[:2]))

    def resets(params, x, segment_ids):
        return reference.attention(params, x, n_heads, segment_ids)

    return Case(AttentionConfig(n_heads), oracle, letters={}, through_library=True, resets=resets)


CASES = {"attention": attention_case(4)}
OPTIONS = {"attention_1_head": attention_case(1)}
