"""Hyena in its published forms, and the other mixers with long convolutions.

Axes: B batch, L length, D channels, W inner width, N gating projections, F filters, H heads.
"""

from functools import wraps

import numpy as np

from hyena_jax.reference.convolution import long_conv, short_conv
from hyena_jax.reference.layers import ACTIVATIONS, dense, gelu, sigmoid


def _each_document_alone(oracle):
    """The oracle of one document, called for every run of equal segment_ids [B, L] by itself."""

    @wraps(oracle)
    def y(config, params, x, max_len, segment_ids, long_filter) -> np.ndarray:
        if (segment_ids == segment_ids[:, :1]).all():
            return oracle(config, params, x, max_len, segment_ids, long_filter)
        rows = []
        for row, ids in zip(x, segment_ids, strict=True):
            starts = np.flatnonzero(np.diff(ids)) + 1
            parts = np.split(row[None], starts, axis=1)
            outputs = [oracle(config, params, part, max_len, None, long_filter) for part in parts]
            rows.append(np.concatenate(outputs, axis=1))
        return np.concatenate(rows)

    return y


def projections(params: dict, x: np.ndarray, n_parts: int) -> list[np.ndarray]:
    """FIR(W x + b) of x [B, L, D], split into gates and v: n_parts arrays [B, W, L]. The FIR is optional."""
    z = dense(params["in_proj"], x).transpose(0, 2, 1)
    if "short_taps" in params:
        z = short_conv(z, params["short_taps"], params.get("short_bias", np.zeros(z.shape[1])))
    return np.split(z, n_parts, axis=1)


def normalized(gate: np.ndarray) -> np.ndarray:
    """gate [B, D, L] / max(its norm over D, 1e-12)."""
    return gate / np.maximum(np.sqrt((gate**2).sum(axis=1, keepdims=True)), 1e-12)


@_each_document_alone
def hyena(config, params, x, max_len, segment_ids, long_filter) -> np.ndarray:
    """The operator with filters h [F, W/H, L] (Poli et al. 2023, arXiv 2302.10866).

    With `config.bidirectional` h is [2 F, W/H, L], and its second half acts on the future. With
    `config.filter_groups` h is [F, filter_groups, L], and each filter serves as many neighbouring channels.
    """
    *gates, v = projections(params, x, config.order + 1)  # each [B, W, L]
    n_filters, n_heads = config.order - (config.gating == "gate_first"), config.n_heads
    count = n_filters * (1 + config.bidirectional)
    h = long_filter(params["filter"], count, x.shape[1], max_len, config.filter)
    h = np.repeat(h, v.shape[1] // n_heads // h.shape[1], axis=1)
    skips = np.float64(params.get("skip", np.zeros(h.shape[:2])))

    def convolve(v: np.ndarray, o: int) -> np.ndarray:
        """Filter o applied to every head, block by block; then the heads are mixed."""
        y = np.zeros_like(v)
        for start in range(0, v.shape[2], max_len // config.n_blocks):
            block = slice(start, start + max_len // config.n_blocks)
            past = np.tile(h[o], (n_heads, 1))
            y[:, :, block] = long_conv(v[:, :, block], past, np.tile(skips[o], n_heads))
            if config.bidirectional:
                future = np.tile(h[n_filters + o], (n_heads, 1))
                y[:, :, block] += long_conv(v[:, :, block][..., ::-1], future, 0 * past[:, 0])[..., ::-1]
        if config.post_order_ffn:
            heads = np.split(y, n_heads, axis=1)
            weights = np.float64(params["order_mix"][o])
            mixed = [sum(weights[a, b] * heads[a] for a in range(n_heads)) for b in range(n_heads)]
            y = np.concatenate(mixed, axis=1)
        return y

    def gate(x_n: np.ndarray) -> np.ndarray:
        """x_n, or its sum over each head's channels with outer mixing."""
        if not config.outer_mixing:
            return x_n
        sums = [np.broadcast_to(a.sum(1, keepdims=True), a.shape) for a in np.split(x_n, n_heads, axis=1)]
        return np.concatenate(sums, axis=1)

    if config.gating == "conv_first":  # equation 6: v <- x_n (h_n * v + b_n v), n = 1..N
        for n in range(config.order):
            v = gate(gates[n]) * convolve(v, n)
    else:  # the published code: filter o acts with gate x_{N-1-o}; x_0 gates the result
        for o in range(config.order - 1):
            v = convolve(v * gate(gates[config.order - 1 - o]), o)
        v = v * gates[0]
    v = ACTIVATIONS[config.activation](v)
    return dense(params["out_proj"], v.transpose(0, 2, 1))


@_each_document_alone
def annotated_hyena(config, params, x, max_len, segment_ids, long_filter) -> np.ndarray:
    """v <- v + u, then v <- v + x_n / max(||x_n||, 1e-12) (h_n * v + B_n v), then v + W_o v + b_o."""
    h = long_filter(params["filter"], config.order, x.shape[1], max_len, config.filter)
    *gates, v = projections(params, x, config.order + 1)
    v = v + np.float64(x).transpose(0, 2, 1)
    for n, x_n in enumerate(gates):
        v = v + normalized(x_n) * long_conv(v, h[n], params["skip"][n])
    v = v.transpose(0, 2, 1)
    return v + dense(params["out_proj"], v)


@_each_document_alone
def gated_hyena(config, params, x, max_len, segment_ids, long_filter) -> np.ndarray:
    """v, g = split(W_in x); (h * v) g + s (1 - g) with s = FIR(x); a centred FIR reads (K-1)/2 ahead."""
    h = long_filter(params["filter"], 1, x.shape[1], max_len, config.filter)
    v, g = np.split(dense(params["in_proj"], x).transpose(0, 2, 1), 2, axis=1)
    y = long_conv(v, h[0], np.zeros(v.shape[1]))
    ahead = 0 if config.causal else (params["short_taps"].shape[1] - 1) // 2
    padded = np.pad(np.float64(x).transpose(0, 2, 1), [(0, 0), (0, 0), (0, ahead)])
    s = short_conv(padded, params["short_taps"], params["short_bias"])[..., ahead:]
    return dense(params["out_proj"], (y * g + s * (1 - g)).transpose(0, 2, 1))


@_each_document_alone
def h3(config, params, x, max_len, segment_ids, long_filter) -> np.ndarray:
    """q SSM_diag(SSM_shift(k) v^T) for each head (Fu et al. 2023, arXiv 2212.14052, section 3.1)."""
    h = long_filter(params["filter"], 1, x.shape[1], max_len, config.filter)
    q, k, v = np.split(dense(params["qkv_proj"], x).transpose(0, 2, 1), 3, axis=1)
    b, c = np.float64(params["shift_b"]), np.float64(params["shift_c"])
    taps = np.zeros_like(c)
    for t in range(taps.shape[1]):  # the shift SSM's impulse response: b writes, c reads t later
        for i in range(taps.shape[1] - t):
            taps[:, t] += c[:, i + t] * b[:, i]
    k = short_conv(k, taps, np.zeros(len(taps))) + np.float64(params["shift_skip"])[:, None] * k
    y = np.zeros_like(v)
    for head in range(x.shape[2] // config.head_dim):
        channels = range(head * config.head_dim, (head + 1) * config.head_dim)
        for j in channels:
            for i in channels:
                kv = (k[:, i] * v[:, j])[:, None]
                z = long_conv(kv, h[0, head : head + 1], params["skip"][head : head + 1])
                y[:, j] += q[:, i] * z[:, 0]
    return dense(params["out_proj"], y.transpose(0, 2, 1))


@_each_document_alone
def s4d(config, params, x, max_len, segment_ids, long_filter) -> np.ndarray:
    """GLU(W_o GELU(h * x + D x)) (Gu et al. 2022, arXiv 2206.11893; the published layer)."""
    h = long_filter(params["filter"], 1, x.shape[1], max_len, config.filter)
    y = long_conv(np.float64(x).transpose(0, 2, 1), h[0], params["skip"][0])
    a, b = np.split(dense(params["out_proj"], gelu(y).transpose(0, 2, 1)), 2, axis=-1)
    return a * sigmoid(b)


@_each_document_alone
def fir(config, params, x, max_len, segment_ids, long_filter) -> np.ndarray:
    """One convolution between two dense layers."""
    h = long_filter(params["filter"], 1, x.shape[1], max_len, config.filter)
    u = dense(params["in_proj"], x).transpose(0, 2, 1)
    return dense(params["out_proj"], long_conv(u, h[0], params["skip"][0]).transpose(0, 2, 1))
