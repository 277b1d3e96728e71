"""Convolutions by their definitions.

Axes: B batch, D channels, L length, K taps.
"""

import numpy as np


def long_conv(u: np.ndarray, h: np.ndarray, skip: np.ndarray) -> np.ndarray:
    """y_t = sum_{s=0..t} h_s u_{t-s} + skip u_t for u [B, D, L], h [D, L], skip [D]."""
    u, h, skip = (np.asarray(a, np.float64) for a in (u, h, skip))
    y = np.zeros_like(u)
    for t in range(u.shape[-1]):
        for s in range(t + 1):
            y[:, :, t] += h[:, s] * u[:, :, t - s]
        y[:, :, t] += skip * u[:, :, t]
    return y


def short_conv(
    x: np.ndarray, taps: np.ndarray, bias: np.ndarray, segment_ids: np.ndarray | None = None
) -> np.ndarray:
    """y_t = bias + sum_{k=0..K-1} taps_k x_{t-k}, with x = 0 before t=0 and outside the segment of t.

    x [B, D, L], taps [D, K], bias [D], segment_ids [B, L].
    """
    x, taps, bias = (np.asarray(a, np.float64) for a in (x, taps, bias))
    batch, _, length = x.shape
    if segment_ids is None:
        segment_ids = np.zeros((batch, length))
    y = np.zeros_like(x)
    for b in range(batch):
        for t in range(length):
            y[b, :, t] = bias
            for k in range(min(taps.shape[-1], t + 1)):
                if segment_ids[b, t - k] == segment_ids[b, t]:
                    y[b, :, t] += taps[:, k] * x[b, :, t - k]
    return y
