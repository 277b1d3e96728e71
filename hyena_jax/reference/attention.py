"""Softmax attention and fastmax attention, by their definitions.

Fastmax: Gerami et al. 2024, arXiv 2402.07901. Axes: B batch, L length, D channels, H heads, G heads of keys
and values, d head_dim.
"""

from math import factorial

import numpy as np

from hyena_jax.reference.layers import dense, norm

# Constants of fastmax that are not options: of `standardize`, and the floor of a sum of weights.
STANDARDIZE_EPS = 1e-5
LEAST_WEIGHT = 1e-3


def softmax_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    segment_ids: np.ndarray,
    causal: bool = True,
    window: int | None = None,
    hard_alibi_heads: int = 0,
) -> np.ndarray:
    """o_t = sum_s softmax_s(q_t . k_s / sqrt(d)) v_s over visible keys s; q [B, L, H, d], k, v [B, L, G, d].

    A key is visible if it is in t's segment, if s <= t (causal) and if t - s <= window (with a window). Query
    head h attends with key head h // (H/G). To the logits of head h = 0, 1, ..., hard_alibi_heads - 1 a bias
    is added, 0 for t - s <= h and -inf beyond (Jelassi et al. 2024).
    """
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    batch, length, n_heads, head_dim = q.shape
    o = np.zeros_like(q)
    for b in range(batch):
        for h in range(n_heads):
            g = h // (n_heads // k.shape[2])
            for t in range(length):
                keys = [s for s in range(length) if segment_ids[b, s] == segment_ids[b, t]]
                if causal:
                    keys = [s for s in keys if s <= t]
                if window is not None:
                    keys = [s for s in keys if t - s <= window]
                logits = k[b, keys, g] @ q[b, t, h] / np.sqrt(head_dim)
                if h < hard_alibi_heads:
                    logits = logits + np.where(t - np.array(keys) <= h, 0, -np.inf)
                weights = np.exp(logits - logits.max())
                o[b, t, h] = weights @ v[b, keys, g] / weights.sum()
    return o


def rotary(x: np.ndarray, fraction: float, base: float, scaling: float = 1.0) -> np.ndarray:
    """Rotates the first n = fraction d channels of x [B, L, H, d] (Su et al. 2021, arXiv 2104.09864).

    At time t, channels i and i + n/2, as real and imaginary part, are multiplied by
    e^{j (t / scaling) base^(-2i/n)}.
    """
    x = np.array(x, np.float64)
    half = round(fraction * x.shape[-1]) // 2
    for t in range(x.shape[1]):
        for i in range(half):
            pair = x[:, t, :, i] + 1j * x[:, t, :, i + half]
            pair = pair * np.exp(1j * t / scaling * base ** (-i / half))
            x[:, t, :, i], x[:, t, :, i + half] = pair.real, pair.imag
    return x


def attention(config, params, x, max_len, segment_ids) -> np.ndarray:
    """The layer: the oracle of `attention`, and of `local_attention`, whose config has a window."""
    n_heads, n_kv_heads = config.n_heads, config.n_kv_heads or config.n_heads
    z = dense(params["qkv_proj"], x)
    z = z.reshape(*x.shape[:2], n_heads + 2 * n_kv_heads, x.shape[2] // n_heads)
    q, k, v = np.split(z, [n_heads, n_heads + n_kv_heads], axis=2)
    if config.qk_norm_eps is not None:
        q, k = (normalised(config, params[f"{name}_norm"], z) for name, z in (("q", q), ("k", k)))
    q, k = (rotary(z, config.rotary_fraction, config.rotary_base, config.rotary_scaling) for z in (q, k))
    window = getattr(config, "window", None)
    o = softmax_attention(q, k, v, segment_ids, config.causal, window, config.hard_alibi_heads)
    return dense(params["out_proj"], o.reshape(x.shape))


def normalised(config, params: dict, z: np.ndarray) -> np.ndarray:
    """RMSNorm of queries or keys z [B, L, H, d], over the channels of a head or of all heads."""
    rows = z if config.qk_norm == "head" else z.reshape(*z.shape[:2], -1)
    return norm(params, rows, "rms", config.qk_norm_eps).reshape(z.shape)


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


def standardize(x: np.ndarray, eps: float) -> np.ndarray:
    """Each token's channels [..., d] with mean 0 and variance 1."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)


def fastmax_layer(config, params, x, max_len, segment_ids) -> np.ndarray:
    """The multi-head layer: the oracle of the mixer `fastmax`."""
    head_dim = x.shape[2] // config.n_heads
    z = dense(params["qkv_proj"], x).reshape(*x.shape[:2], 3, config.n_heads, head_dim)
    q, k, v = z[:, :, 0], z[:, :, 1], z[:, :, 2]
    if config.standardize:
        q, k = standardize(q, STANDARDIZE_EPS), standardize(k, STANDARDIZE_EPS)
    scale = 1 / np.sqrt(head_dim) if config.scale is None else config.scale
    o = fastmax(scale * q, k, v, config.p, segment_ids, config.causal, LEAST_WEIGHT)
    return dense(params["out_proj"], o.reshape(x.shape))
