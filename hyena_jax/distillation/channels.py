"""Mapping a function over channels, in groups that fit in memory, on all cores."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import threadpool_limits

# Bytes of the largest array of a group.
GROUP_BYTES = 64 * 2**20


def in_groups(
    function: Callable[[np.ndarray], tuple[np.ndarray, ...]], taps: np.ndarray, channel_bytes: int
) -> list[np.ndarray]:
    """`function` of taps [C, T], computed in parallel on groups of channels; all results have C first.

    Args:
      channel_bytes: bytes per channel of the largest array that the function makes.
    """
    cores = os.cpu_count() or 1
    rows = max(1, min(GROUP_BYTES // channel_bytes, -(-len(taps) // cores)))
    groups = [taps[i : i + rows] for i in range(0, len(taps), rows)]
    # BLAS threads spin while they wait: on many small matrices they would take the cores from this pool.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(cores) as pool:
        return [np.concatenate(parts) for parts in zip(*pool.map(function, groups), strict=True)]
