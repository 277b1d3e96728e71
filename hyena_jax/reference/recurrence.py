"""Linear recurrences, and the RG-LRU block of Hawk and Griffin.

De et al. 2024, arXiv 2402.19427. Axes: B batch, L length, D channels, W recurrence width, H blocks of the
gates.
"""

import numpy as np

from hyena_jax.reference.convolution import short_conv
from hyena_jax.reference.layers import dense, gelu, gelu_tanh, sigmoid, softplus


def linear_recurrence(
    a: np.ndarray, x: np.ndarray, h0: np.ndarray, reverse: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """h_t = a_t h_{t-1} + x_t with h_{-1} = h0; in reverse, h_t = a_t h_{t+1} + x_t with h_L = h0.

    a, x [B, L, D], h0 [B, D]; returns h [B, L, D] and the last state computed [B, D].
    """
    a, x, state = (np.asarray(v, np.float64) for v in (a, x, h0))
    h = np.zeros_like(x)
    times = range(x.shape[1])
    for t in reversed(times) if reverse else times:
        state = a[:, t] * state + x[:, t]
        h[:, t] = state
    return h, state


def rg_lru(
    x: np.ndarray,
    r: np.ndarray,
    i: np.ndarray,
    rate: np.ndarray,
    starts: np.ndarray,
    s: np.ndarray | float = 1.0,
    shifted: bool = False,
) -> np.ndarray:
    """Equations 3 and 4 with a = exp(-softplus(rate)), c = 8; at the start of a document, h_t = i_t x_t.

    x and the gates r, i [B, L, W], rate [W], starts [B, L]. Not in the paper: factors of either sign,
    2 a_t - 1 in place of a_t if `shifted`, times the sign gate s [B, L, W].
    """
    a = np.exp(-8 * r * softplus(rate))
    a = s * (2 * a - 1 if shifted else a)
    h = np.zeros_like(x)
    for b in range(x.shape[0]):
        state = np.zeros(x.shape[2])
        for t in range(x.shape[1]):
            kept, scale = a[b, t], np.sqrt(1 - a[b, t] ** 2)
            if starts[b, t]:
                kept, scale = 0, 1
            state = kept * state + scale * i[b, t] * x[b, t]
            h[b, t] = state
    return h


def hawk(config, params, x, max_len, segment_ids) -> np.ndarray:
    """W_o (GELU(W_g x) ⊙ RGLRU(FIR(W_r x))) (section 2.3, figure 2c).

    The first token of the sequence counts as the start of a document if `config.reset_at_start` is set.
    """
    gate, u = np.split(dense(params["in_proj"], x), 2, axis=-1)
    u = short_fir(params, u, segment_ids)
    starts = document_starts(segment_ids)
    starts[:, 0] = config.reset_at_start
    r = sigmoid(block_dense(params["recurrence_gate"], u))  # equation 1
    i = sigmoid(block_dense(params["input_gate"], u))  # equation 2
    s = np.tanh(block_dense(params["sign_gate"], u)) if config.sign == "gate" else 1.0
    h = rg_lru(u, r, i, np.float64(params["rate"]), starts, s, config.sign == "shifted")
    activation = gelu if config.gelu == "erf" else gelu_tanh
    return dense(params["out_proj"], activation(gate) * h)


def block_dense(params: dict, x: np.ndarray) -> np.ndarray:
    """Multiplies block j of the W inputs by kernel[j]; kernel [H, W/H, W/H], bias [W]."""
    kernel = np.float64(params["kernel"])
    parts = np.split(x, len(kernel), axis=-1)
    y = np.concatenate([part @ kernel[j] for j, part in enumerate(parts)], axis=-1)
    return y + np.float64(params.get("bias", 0))


def short_fir(params: dict, u: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
    """The short FIR of u [B, L, C], with a bias if `params` has one."""
    bias = params.get("short_bias", np.zeros(u.shape[-1]))
    return short_conv(u.transpose(0, 2, 1), params["short_taps"], bias, segment_ids).transpose(0, 2, 1)


def document_starts(segment_ids: np.ndarray) -> np.ndarray:
    """Whether the document's id [B, L] differs from that of the token before; the first token's does not."""
    return np.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
