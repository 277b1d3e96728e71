"""The time mixer of RWKV-7 (2503.14456), token by token, as its equations are written.

Axes: B batch, L tokens, D channels, H heads, K channels of a head.
"""

import numpy as np

from hyena_jax.reference.layers import dense, sigmoid
from hyena_jax.reference.recurrence import document_starts


def rwkv7(config, params, x, max_len, segment_ids, handed) -> np.ndarray:
    """W_o (g ⊙ (LayerNorm(o) + (r ⊙ k ⊙ bonus) v)), o of a memory that decays, erases and writes."""
    batch, length, _ = x.shape
    starts, heads = document_starts(segment_ids), config.n_heads
    before = token_before(x, starts)
    inputs = [x + mu * (before - x) for mu in np.float64(params["shift_mix"])]
    of_r, of_w, of_k, of_v, of_a, of_g = inputs
    r, k, v = dense(params["r_proj"], of_r), dense(params["k_proj"], of_k), dense(params["v_proj"], of_v)
    w = np.exp(-np.exp(-0.5) * sigmoid(_low_rank(params["decay"], of_w, np.tanh)))
    a = sigmoid(_low_rank(params["rate"], of_a))
    gate = _low_rank(params["gate"], of_g, sigmoid)
    v_first = handed.setdefault("rwkv7_v", v)
    if v_first is not v:
        v = v + (v_first - v) * sigmoid(_low_rank(params["value"], of_v))
    kappa = k * np.float64(params["removal"])
    k = k * (1 + (a - 1) * np.float64(params["booster"]))
    r, k, v, w, a, kappa = (z.reshape(batch, length, heads, -1) for z in (r, k, v, w, a, kappa))
    kappa = kappa / np.maximum(np.sqrt((kappa**2).sum(axis=-1, keepdims=True)), 1e-12)
    o = np.zeros(v.shape)
    for row in range(batch):
        for head in range(heads):
            state = np.zeros((k.shape[3], v.shape[3]))
            for t in range(length):
                if starts[row, t]:
                    state = 0 * state
                at = row, t, head
                transition = np.diag(w[at]) - np.outer(a[at] * kappa[at], kappa[at])
                state = transition @ state + np.outer(k[at], v[at])
                o[at] = state.T @ r[at]
    o = o - o.mean(axis=-1, keepdims=True)
    o = o / np.sqrt((o**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    norm = params["norm"]
    o = o.reshape(x.shape) * np.float64(norm["scale"]) + np.float64(norm["bias"])
    bonus = (r * k * np.float64(params["bonus"])).sum(axis=-1, keepdims=True) * v
    return dense(params["out_proj"], gate * (o + bonus.reshape(x.shape)))


def token_before(x: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The token before each of x [B, L, D]; 0 at the start [B, L] of a document."""
    before = np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)
    return np.where(starts[..., None], 0, before)


def _low_rank(params, x, activation=lambda x: x) -> np.ndarray:
    """W_2 f(W_1 x) + bias."""
    return dense(params["up"], activation(dense(params["down"], x))) + np.float64(params.get("bias", 0))
