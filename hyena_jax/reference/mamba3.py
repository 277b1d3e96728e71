"""Mamba-3 (2603.15569), token by token, as its equations are written.

Axes: B batch, L tokens, H heads, P channels of a head, N state size, R inputs of a token, S planes that turn.
"""

import numpy as np

from hyena_jax.reference.layers import dense, sigmoid, silu, softplus
from hyena_jax.reference.recurrence import document_starts


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
