"""The delta rule, token by token, and the layers of gated DeltaNet and Mamba-2.

Axes: B batch, L tokens, n updates and m queries of a token, H heads of queries and keys, G heads of values, K
channels of a key, V channels of a value.
"""

import numpy as np

from hyena_jax.reference.layers import dense, sigmoid, silu, softplus
from hyena_jax.reference.recurrence import document_starts, short_fir

# Added to the squared length of a query or key before the root; not an option.
LENGTH_EPS = 1e-6


def delta_rule(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_a: np.ndarray,
    read: np.ndarray | None,
    write: np.ndarray | None,
    state: np.ndarray,
    starts: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [B, m L, G, V] and the last memory [B, G, K, V] of the rule in `hyena_jax.ops.delta_rule`.

    q [B, m L, H, K], k [B, n L, H, K], v [B, n L, G, V], log_a [B, L, G] or [B, L, G, K], read and write
    [B, n L, G, K], or None for a sum of k v^T that erases nothing, and for k; state [B, G, K, V]; starts
    [B, L], True where the memory is reset.
    """
    q, k, v, log_a = (np.asarray(x, np.float64) for x in (q, k, v, log_a))
    (batch, length), n_heads = log_a.shape[:2], v.shape[2]
    m, n = q.shape[1] // length, k.shape[1] // length

    def of_values(x: np.ndarray) -> np.ndarray:
        return np.repeat(x, n_heads // x.shape[2], axis=2)

    q, k, log_a = of_values(q), of_values(k), of_values(log_a)
    a = np.exp(log_a if log_a.ndim == 4 else log_a[..., None])
    read, write = (None if x is None else of_values(np.asarray(x, np.float64)) for x in (read, write))
    write = k if write is None else write
    o, last = np.zeros((batch, m * length, *v.shape[2:])), np.array(state, np.float64)
    for b in range(batch):
        for head in range(n_heads):
            memory = last[b, head]
            for t in range(length):
                memory = a[b, t, head][:, None] * (np.zeros_like(memory) if starts[b, t] else memory)
                for row in range(n * t, n * (t + 1)):
                    erased = 0 if read is None else np.outer(write[b, row, head], read[b, row, head] @ memory)
                    memory = memory - erased + np.outer(k[b, row, head], v[b, row, head])
                for row in range(m * t, m * (t + 1)):
                    o[b, row, head] = q[b, row, head] @ memory
            last[b, head] = memory
    return o, last


def gated_delta(config, params, x, max_len, segment_ids) -> np.ndarray:
    """W_o (RMSNorm(o) ⊙ SiLU(W_g x)), o of the gated delta rule (2412.06464, section 3.4)."""
    batch, length, d_model = x.shape
    heads, n = config.n_heads, config.factors
    key_dim = config.key_dim or d_model // heads
    value_heads, value_dim = config.n_value_heads or heads, config.value_dim or key_dim
    u = silu(short_fir(params, dense(params["qkv_proj"], x), segment_ids))
    q, k, v = np.split(u, [heads * key_dim, (1 + n) * heads * key_dim], axis=-1)
    q, k = q.reshape(batch, length, heads, key_dim), k.reshape(batch, n * length, heads, key_dim)
    q, k = (z / np.sqrt((z**2).sum(axis=-1, keepdims=True) + LENGTH_EPS) for z in (q, k))
    beta = sigmoid(dense(params["beta_proj"], x)).reshape(batch, n * length, value_heads)
    log_a = np.zeros((batch, length, value_heads))
    if config.decay:
        rate = softplus(dense(params["decay_proj"], x) + np.float64(params["dt_bias"]))
        log_a = -np.exp(np.float64(params["a_log"])) * rate
    beta = (2 * beta if config.negative_eigenvalues else beta)[..., None]
    o, _ = delta_rule(
        q / np.sqrt(key_dim),
        k,
        beta * v.reshape(batch, n * length, value_heads, value_dim),
        log_a,
        beta * np.repeat(k, value_heads // heads, axis=2),
        None,
        np.zeros((batch, value_heads, key_dim, value_dim)),
        document_starts(segment_ids),
    )
    o = _normed(config, params, o)
    if config.gate:
        o = o * silu(dense(params["gate_proj"], x))
    return dense(params["out_proj"], o)


def kda(config, params, x, max_len, segment_ids) -> np.ndarray:
    """W_o (RMSNorm(o) ⊙ σ(W_g2 W_g1 x + c)), o of the delta rule with decays of channels (2510.26692)."""
    sizes, (batch, length, _) = config.sizes(x.shape[2]), x.shape
    q, k, v = _short_qkv(params, x, sizes, segment_ids)
    beta = sigmoid(dense(params["beta_proj"], x))[..., None]
    beta = 2 * beta if config.negative_eigenvalues else beta
    rate = dense(params["decay_up"], dense(params["decay_down"], x)) + np.float64(params["dt_bias"])
    rate = rate.reshape(batch, length, sizes.values, sizes.key_dim)
    scale = np.exp(np.float64(params["a_log"]))[:, None]
    log_a = -scale * softplus(rate)
    if config.decay_bound is not None:
        log_a = config.decay_bound * sigmoid(scale * rate)
    read = beta * np.repeat(k, sizes.values // sizes.keys, axis=2)
    memory = np.zeros((batch, sizes.values, sizes.key_dim, sizes.value_dim))
    o, _ = delta_rule(q, k, beta * v, log_a, read, None, memory, document_starts(segment_ids))
    gate = dense(params["gate_up"], dense(params["gate_down"], x))
    return dense(params["out_proj"], _normed(config, params, o) * sigmoid(gate))


def gated_delta2(config, params, x, max_len, segment_ids) -> np.ndarray:
    """W_o (RMSNorm(o) ⊙ gate), with gates of each channel for what is erased and written (2605.22791)."""
    sizes = config.sizes(x.shape[2])
    q, k, v = _short_qkv(params, x, sizes, segment_ids)
    erase = sigmoid(dense(params["erase_proj"], x)).reshape(k.shape)
    erase = 2 * erase if config.negative_eigenvalues else erase
    write = sigmoid(dense(params["write_proj"], x)).reshape(v.shape)
    rate = dense(params["decay_up"], dense(params["decay_down"], x)) + np.float64(params["dt_bias"])
    log_a = -np.exp(np.float64(params["a_log"]))[:, None] * softplus(rate).reshape(k.shape)
    memory = np.zeros((len(x), sizes.values, sizes.key_dim, sizes.value_dim))
    o, _ = delta_rule(q, k, write * v, log_a, erase * k, None, memory, document_starts(segment_ids))
    gate = dense(params["gate_up"], dense(params["gate_down"], x))
    gate = silu(gate) if config.gate == "silu" else sigmoid(gate)
    return dense(params["out_proj"], _normed(config, params, o) * gate)


def _short_qkv(params, x, sizes, segment_ids) -> list[np.ndarray]:
    """Queries and keys [B, L, H, K] of length 1, scaled, and values [B, L, G, V]."""
    keys = sizes.keys * sizes.key_dim
    u = silu(short_fir(params, dense(params["qkv_proj"], x), segment_ids))
    q, k, v = np.split(u, [keys, 2 * keys], axis=-1)
    q, k = (z.reshape(*x.shape[:2], sizes.keys, -1) for z in (q, k))
    q, k = (z / np.sqrt((z**2).sum(axis=-1, keepdims=True) + LENGTH_EPS) for z in (q, k))
    return [q / np.sqrt(sizes.key_dim), k, v.reshape(*x.shape[:2], sizes.values, -1)]


def _normed(config, params, o) -> np.ndarray:
    """RMSNorm of each head's outputs [B, L, G, V], as [B, L, G V]."""
    o = o / np.sqrt((o**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    return (o * np.float64(params["norm"]["scale"])).reshape(*o.shape[:2], -1)


def mamba2(config, params, x, max_len, segment_ids) -> np.ndarray:
    """W_o RMSNorm(o ⊙ SiLU(z)), o of h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T (2405.21060, figure 6)."""
    batch, length, d_model = x.shape
    width, heads, groups = config.inner_factor * d_model, config.n_heads, config.n_groups
    states = groups * config.d_state
    z, u, dt = np.split(dense(params["in_proj"], x), [width, 2 * (width + states)], axis=-1)
    u, b, c = np.split(silu(short_fir(params, u, segment_ids)), [width, width + states], axis=-1)
    u, b, c = (part.reshape(batch, length, n, -1) for part, n in ((u, heads), (b, groups), (c, groups)))
    dt = softplus(dt + np.float64(params["dt_bias"]))
    if config.dt_limit is not None:
        dt = np.clip(dt, *config.dt_limit)
    log_a, memory = (
        -np.exp(np.float64(params["a_log"])) * dt,
        np.zeros((batch, heads, b.shape[3], u.shape[3])),
    )
    o, _ = delta_rule(c, b, dt[..., None] * u, log_a, None, None, memory, document_starts(segment_ids))
    y = (o + np.float64(params["skip"])[:, None] * u).reshape(batch, length, width) * silu(z)
    y = y.reshape(batch, length, groups, -1)
    y = y / np.sqrt((y**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    return dense(params["out_proj"], np.float64(params["norm"]["scale"]) * y.reshape(batch, length, width))
