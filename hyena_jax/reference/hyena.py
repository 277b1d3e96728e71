"""The Hyena operator and its implicit filter (Poli et al. 2023, arXiv 2302.10866).

Axes: B batch, L length, D channels, N gating projections, F filters. `params` are the nested dictionaries
of `hyena_jax.mixers.Hyena`, as NumPy arrays.
"""

import numpy as np

from hyena_jax.reference.convolution import long_conv, short_conv


def implicit_filter(params: dict, n_filters: int, length: int, max_len: int, config) -> np.ndarray:
    """h [F, D, length]: a sine network of the time index under an exponential window (section 3.3).

    Flattened channel d F + o of the network's output is filter o of channel d.
    """
    features = np.asarray(params["positions"], np.float64)
    frequency = np.asarray(params["sine_frequency"], np.float64)
    hidden = features
    for layer in range(config.n_hidden + 1):
        dense = params[f"dense_{layer}"]
        hidden = np.sin(frequency * (hidden @ np.float64(dense["kernel"]) + np.float64(dense["bias"])))
    h = hidden @ np.float64(params[f"dense_{config.n_hidden + 1}"]["kernel"])  # [Lmax, D F]

    channels = h.shape[-1]
    slow = np.log(config.decay_target) / config.slow_decay
    fast = np.log(config.decay_target) / config.fast_decay
    decay = np.abs(np.float64(params.get("decay", np.linspace(slow, fast, channels))))
    time = np.arange(max_len) / max(max_len - 1, 1)
    h = h * (np.exp(-time[:, None] * decay) + config.window_shift)
    if config.norm_axis == "channels":
        h = h / np.abs(h).sum(axis=1, keepdims=True)
    elif config.norm_axis == "length":
        h = h / np.abs(h).sum(axis=0, keepdims=True)
    return h[:length].reshape(length, channels // n_filters, n_filters).transpose(2, 1, 0)


def positional_features(max_len: int, emb_dim: int) -> np.ndarray:
    """z_t = [t/(Lmax-1), cos(f w_t), -sin(f w_t)], w_t = 2 pi t / Lmax (appendix A.3): [Lmax, emb_dim]."""
    bands = (emb_dim - 1) // 2
    z = np.zeros((max_len, emb_dim))
    frequencies = np.linspace(1e-4, bands - 1, bands)
    for t in range(max_len):
        w = 2 * np.pi * t / max_len
        z[t, 0] = t / max(max_len - 1, 1)
        z[t, 1 : 1 + bands] = np.cos(frequencies * w)
        z[t, 1 + bands :] = -np.sin(frequencies * w)
    return z


def hyena(params: dict, x: np.ndarray, h: np.ndarray, gating: str) -> np.ndarray:
    """The operator for x [B, L, D] with its filters h [F, D, L] given."""
    project, out = params["in_proj"], params["out_proj"]
    z = np.float64(x) @ np.float64(project["kernel"]) + np.float64(project["bias"])
    z = short_conv(z.transpose(0, 2, 1), params["short_taps"], params["short_bias"])
    order = z.shape[1] // x.shape[-1] - 1
    *gates, v = np.split(z, order + 1, axis=1)  # each [B, D, L]
    skips = np.float64(params["skip"])
    if gating == "conv_first":  # equation 6: v <- x_n (h_n * v + b_n v), n = 1..N
        for n in range(order):
            v = gates[n] * long_conv(v, h[n], skips[n])
    else:  # the published code: filter o acts with gate x_{N-1-o}; x_0 gates the result
        for o in range(order - 1):
            v = long_conv(v * gates[order - 1 - o], h[o], skips[o])
        v = v * gates[0]
    return v.transpose(0, 2, 1) @ np.float64(out["kernel"]) + np.float64(out["bias"])
