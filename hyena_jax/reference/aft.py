"""The attention-free transformer's operators, by definition.

Zhai et al. 2021, arXiv 2105.14103. Axes: B batch, L length, D channels, H heads.
"""

import numpy as np

from hyena_jax.reference.layers import dense, sigmoid

# Added to the variance of the taps of AFT-conv, which are standardised; not an option.
TAPS_EPS = 1e-8


def aft(q: np.ndarray, k: np.ndarray, v: np.ndarray, w: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
    """y_t = sigmoid(q_t) ⊙ sum_{s<=t} exp(k_s + w_{t,s}) v_s / sum_{s<=t} exp(k_s + w_{t,s}).

    q, k, v [B, L, D]; position biases w [D, L, L], indexed by positions from the start of the segment. s runs
    over the keys of t's segment.
    """
    y = np.zeros_like(v)
    batch, length, channels = v.shape
    for b in range(batch):
        for t in range(length):
            keys = [s for s in range(t + 1) if segment_ids[b, s] == segment_ids[b, t]]
            start = keys[0]
            for c in range(channels):
                logits = k[b, keys, c] + w[c, t - start, : len(keys)]
                weights = np.exp(logits - logits.max())
                y[b, t, c] = weights @ v[b, keys, c] / weights.sum()
    return sigmoid(q) * y


def full_biases(params: dict, length: int) -> np.ndarray:
    """w_{t,s} = u_t . v_s, equal for all channels: [L, L] (AFT-full)."""
    u, v = np.float64(params["position_queries"]), np.float64(params["position_keys"])
    return u[:length] @ v[:length].T


def local_biases(params: dict, length: int, window: int) -> np.ndarray:
    """`full_biases` where t - s < window, and 0 (not minus infinity) elsewhere: [L, L] (AFT-local)."""
    w = full_biases(params, length)
    for t in range(length):
        w[t, : max(t - window + 1, 0)] = 0
    return w


def conv_biases(params: dict, length: int, eps: float) -> np.ndarray:
    """w^h_{t,s} = gamma tap^h_{t-s} + beta, taps standardised; 0 past the last tap: [H, L, L] (AFT-conv)."""
    taps = np.float64(params["position_taps"])
    centred = taps - taps.mean(axis=1, keepdims=True)
    taps = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + eps)
    taps = np.float64(params["position_scale"])[:, None] * taps + np.float64(params["position_bias"])[:, None]
    w = np.zeros((taps.shape[0], length, length))
    for t in range(length):
        for s in range(t + 1):
            if t - s < taps.shape[1]:
                w[:, t, s] = taps[:, t - s]
    return w


def layer(params: dict, x: np.ndarray, w: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
    """The whole layer for x [B, L, D] and position biases w [H, L, L]; each head has D/H channels.

    Keys have D channels, or H in AFT-conv, where all channels of a head share one key.
    """
    width = x.shape[2]
    z = dense(params["qkv_proj"], x)
    q, k, v = z[..., :width], z[..., width:-width], z[..., -width:]
    k = np.repeat(k, width // k.shape[2], axis=2)
    w = np.repeat(w, width // w.shape[0], axis=0)
    return dense(params["out_proj"], aft(q, k, v, w, segment_ids))


def aft_simple(config, params, x, max_len, segment_ids) -> np.ndarray:
    """The layer without position biases."""
    return layer(params, x, np.zeros((1, x.shape[1], x.shape[1])), segment_ids)


def aft_full(config, params, x, max_len, segment_ids) -> np.ndarray:
    """The layer with `full_biases`."""
    return layer(params, x, full_biases(params, x.shape[1])[None], segment_ids)


def aft_local(config, params, x, max_len, segment_ids) -> np.ndarray:
    """The layer with `local_biases`."""
    return layer(params, x, local_biases(params, x.shape[1], config.window)[None], segment_ids)


def aft_conv(config, params, x, max_len, segment_ids) -> np.ndarray:
    """The layer with `conv_biases`."""
    return layer(params, x, conv_biases(params, x.shape[1], TAPS_EPS), segment_ids)
