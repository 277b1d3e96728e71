"""Softmax attention, by its definition. Axes: B batch, L length, H heads, d head_dim."""

import numpy as np


def softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
    """o_t = sum_{s<=t} softmax_s(q_t . k_s / sqrt(d)) v_s over keys of t's segment; q, k, v [B, L, H, d]."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    batch, length, heads, head_dim = q.shape
    o = np.zeros_like(v)
    for b in range(batch):
        for head in range(heads):
            for t in range(length):
                keys = [s for s in range(t + 1) if segment_ids[b, s] == segment_ids[b, t]]
                logits = k[b, keys, head] @ q[b, t, head] / np.sqrt(head_dim)
                weights = np.exp(logits - logits.max())
                o[b, t, head] = weights @ v[b, keys, head] / weights.sum()
    return o


def attention(params: dict, x: np.ndarray, n_heads: int, segment_ids: np.ndarray) -> np.ndarray:
    """The multi-head layer for x [B, L, D]; `params` as in `hyena_jax.mixers.Attention`."""
    qkv, out = params["qkv_proj"], params["out_proj"]
    z = np.float64(x) @ np.float64(qkv["kernel"]) + np.float64(qkv["bias"])
    z = z.reshape(*x.shape[:2], 3, n_heads, x.shape[2] // n_heads)
    o = softmax_attention(z[:, :, 0], z[:, :, 1], z[:, :, 2], segment_ids)
    return o.reshape(x.shape) @ np.float64(out["kernel"]) + np.float64(out["bias"])
