"""Fastmax attention, by its definition.

Gerami et al. 2024, arXiv 2402.07901. Axes: B batch, L length, H heads, d head_dim.
"""

from math import factorial

import numpy as np

from hyena_jax.reference.layers import dense

# Constants of the definition that are not options: of `standardize`, and the floor of a sum of weights.
STANDARDIZE_EPS = 1e-5
LEAST_WEIGHT = 1e-3


def fastmax(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, p: int, segment_ids: np.ndarray, causal: bool, floor: float
) -> np.ndarray:
    """o_t = sum_s f(q_t . k_s) v_s / sum_s f(q_t . k_s), f(x) = sum_{l=0..p} x^l / l!.

    q, k, v [B, L, H, d]. s runs over the keys of t's segment, up to t if `causal`. A sum of weights closer to
    0 than `floor` is replaced by `floor` with the sum's sign.
    """
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    batch, length, heads, _ = q.shape
    o = np.zeros_like(v)
    for b in range(batch):
        for head in range(heads):
            for t in range(length):
                end = t + 1 if causal else length
                keys = [s for s in range(end) if segment_ids[b, s] == segment_ids[b, t]]
                x = k[b, keys, head] @ q[b, t, head]
                weights = sum(x**degree / factorial(degree) for degree in range(p + 1))
                total = weights.sum()
                if abs(total) < floor:
                    total = -floor if total < 0 else floor
                o[b, t, head] = weights @ v[b, keys, head] / total
    return o


def features(x: np.ndarray, p: int) -> np.ndarray:
    """phi(x) [M] of x [d] with phi(q) . phi(k) = f(q . k): M = 1 + d + d^2 + .. + d^p.

    For each degree l all products of l entries, divided by sqrt(l!). (Products of the same entries in another
    order are equal; `hyena_jax.ops.fastmax` keeps one of them, which gives C(d+p, p) features.)
    """
    parts, products = [], np.ones(1)
    for degree in range(p + 1):
        parts.append(products / np.sqrt(factorial(degree)))
        products = np.outer(products, x).ravel()
    return np.concatenate(parts)


def running_sums(q: np.ndarray, k: np.ndarray, v: np.ndarray, p: int) -> np.ndarray:
    """The causal `fastmax` of one head, q, k, v [L, d], with a state of fixed size: no weight is computed.

    o_t = phi(q_t) S_t / phi(q_t) . z_t, S_t = sum_{s<=t} phi(k_s) v_s^T, z_t = sum_{s<=t} phi(k_s).
    """
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    n_features = len(features(q[0], p))
    sums, normaliser = np.zeros((n_features, v.shape[1])), np.zeros(n_features)
    o = np.zeros_like(v)
    for t in range(len(q)):
        key = features(k[t], p)
        sums += np.outer(key, v[t])
        normaliser += key
        query = features(q[t], p)
        o[t] = query @ sums / (query @ normaliser)
    return o


def standardize(x: np.ndarray, eps: float) -> np.ndarray:
    """Each token's channels [..., d] with mean 0 and variance 1."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)


def attention(config, params, x, max_len, segment_ids) -> np.ndarray:
    """The multi-head layer: the oracle of the mixer `fastmax`."""
    head_dim = x.shape[2] // config.n_heads
    z = dense(params["qkv_proj"], x).reshape(*x.shape[:2], 3, config.n_heads, head_dim)
    q, k, v = z[:, :, 0], z[:, :, 1], z[:, :, 2]
    if config.standardize:
        q, k = standardize(q, STANDARDIZE_EPS), standardize(k, STANDARDIZE_EPS)
    scale = 1 / np.sqrt(head_dim) if config.scale is None else config.scale
    o = fastmax(scale * q, k, v, config.p, segment_ids, config.causal, LEAST_WEIGHT)
    return dense(params["out_proj"], o.reshape(x.shape))
