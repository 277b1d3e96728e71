"""The delta rule, token by token, and the layers with a matrix memory: gated delta rules, RWKV-7, Mambas.

Axes: B batch, L tokens, n updates and m queries of a token, H heads of queries and keys, G heads of values, K
channels of a key, V channels of a value. The equations of `rwkv7` (2503.14456) and `mamba3` (2603.15569) are
written out: D channels, P channels of a head, N state size, R inputs of a token, S planes that turn.
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


def mamba3(config, params, x, max_len, segment_ids) -> np.ndarray:
    """W_o sum_r (mimo_o_r ⊙ o_r ⊙ SiLU(z ⊙ mimo_z_r)), o of the trapezoidal rule with keys that turn."""
    batch, length, d_model = x.shape
    heads, n_inputs, groups, states = config.n_heads, config.n_inputs, config.n_groups, config.d_state
    width, of_inputs = config.inner_factor * d_model, n_inputs * groups * states
    columns = np.cumsum([width, width, of_inputs, of_inputs, heads, heads, heads])
    z, v, b, c, dt, rate, trap, angle = np.split(dense(params["in_proj"], x), columns, axis=-1)
    z, v = (part.reshape(batch, length, heads, 1, -1) for part in (z, v))
    dt = softplus(dt + np.float64(params["dt_bias"]))
    if config.rate == "softplus":
        rate = softplus(rate)
    else:
        rate = np.where(rate > 0, 1 + rate, 1 / (1 - np.minimum(rate, 0)))
    a, weight = np.exp(-np.maximum(rate, 1e-4) * dt), sigmoid(trap)
    theta = np.cumsum(np.pi * np.tanh(angle)[:, :, None] * dt[..., None], axis=1)  # [B, L, H, S]
    k, q = (_turned(config, params, name, part, theta) for name, part in (("b", b), ("c", c)))
    if n_inputs > 1:
        v, z = v * np.float64(params["mimo_x"]), z * np.float64(params["mimo_z"])
    starts, o = document_starts(segment_ids), np.zeros(v.shape)
    for row in range(batch):
        for head in range(heads):
            h, last_k, last_v = np.zeros((states, v.shape[4])), k[row, 0, head] * 0, v[row, 0, head] * 0
            for t in range(length):
                if starts[row, t]:
                    h, last_k, last_v = 0 * h, 0 * last_k, 0 * last_v
                share, step, factor = weight[row, t, head], dt[row, t, head], a[row, t, head]
                h = factor * h + (1 - share) * step * factor * last_k.T @ last_v
                last_k, last_v = k[row, t, head], v[row, t, head]
                h = h + share * step * last_k.T @ last_v
                o[row, t, head] = q[row, t, head] @ h
    o = o + np.float64(params["skip"])[:, None, None] * v
    if config.out_norm:
        scale = np.float64(params["norm"]["scale"]).reshape(heads, 1, -1)
        o = scale * o / np.sqrt((o**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    y = o * silu(z) * (np.float64(params["mimo_o"]) if n_inputs > 1 else 1)
    return dense(params["out_proj"], y.sum(axis=3).reshape(batch, length, width))


def _turned(config, params, name, part, theta) -> np.ndarray:
    """B or C, normalised, with its bias, turned: [B, L, H, R, N]."""
    part = part.reshape(*part.shape[:2], config.n_inputs, config.n_groups, config.d_state)
    part = part / np.sqrt((part**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    part = np.float64(params[f"{name}_norm"]["scale"]) * part
    of_heads = np.repeat(part, config.n_heads // config.n_groups, axis=3).swapaxes(2, 3)
    y = of_heads + np.float64(params[f"{name}_bias"])
    turned, half = y.copy(), config.d_state // 2
    for plane in range(theta.shape[-1]):
        i, j = (2 * plane, 2 * plane + 1) if config.n_inputs == 1 else (plane, plane + half)
        cos, sin = np.cos(theta[..., plane])[..., None], np.sin(theta[..., plane])[..., None]
        turned[..., i] = y[..., i] * cos - y[..., j] * sin
        turned[..., j] = y[..., i] * sin + y[..., j] * cos
    return turned
