"""Work on many channels in groups that fit in memory, on all cores."""

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
    """`function` of taps [C, T], whose results all start with C, from groups of channels side by side.

    Args:
      channel_bytes: of the largest array that the function makes for one channel.
    """
    cores = os.cpu_count() or 1
    rows = max(1, min(GROUP_BYTES // channel_bytes, -(-len(taps) // cores)))
    groups = [taps[i : i + rows] for i in range(0, len(taps), rows)]
    # The threads of BLAS wait by spinning: on many small matrices they take the cores from these.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(cores) as pool:
        return [np.concatenate(parts) for parts in zip(*pool.map(function, groups), strict=True)]
