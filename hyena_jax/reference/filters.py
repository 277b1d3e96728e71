"""Long filters, by their definitions. Axes: L length, D channels, N filters, M taps or modes.

Every function is (params, n_filters, length, max_len, config) -> h [N, D, length]; `params` are the nested
dictionaries of the module of the same name in `hyena_jax.filters`, as NumPy arrays.
"""

import numpy as np

from hyena_jax.reference.layers import dense, gelu


def ckconv(params: dict, n_filters: int, length: int, max_len: int, config) -> np.ndarray:
    """A sine network of the time index (Romero et al. 2021). Output d N + o is filter o of channel d."""
    return _by_filter(_sine_network(params, config)[:length], n_filters)


def implicit(params: dict, n_filters: int, length: int, max_len: int, config) -> np.ndarray:
    """The sine network under an exponential window (Poli et al. 2023, section 3.3)."""
    h = _sine_network(params, config)
    default = decay_rates(config, h.shape[1])
    decay = np.abs(np.float64(params.get("decay", default)))
    time = np.arange(max_len) / max(max_len - 1, 1)
    h = h * (np.exp(-time[:, None] * decay) + config.window_shift)
    if config.norm_axis == "channels":
        h = h / np.abs(h).sum(axis=1, keepdims=True)
    elif config.norm_axis == "length":
        h = h / np.abs(h).sum(axis=0, keepdims=True)
    return _by_filter(h[:length], n_filters)


def siren(params: dict, n_filters: int, length: int, max_len: int, config) -> np.ndarray:
    """A sine network of time in -1..1, under a window that the filters of a channel share."""
    hidden = np.linspace(-1, 1, max_len)[:length, None] if max_len > 1 else np.full((1, 1), -1.0)
    for i in range(config.n_hidden + 1):
        hidden = np.sin((config.frequency if i == 0 else 1) * dense(params[f"dense_{i}"], hidden))
    h = _by_filter(dense(params[f"dense_{config.n_hidden + 1}"], hidden), n_filters)
    time = np.linspace(0, 1, max_len)[:length]
    return h * np.exp(-np.abs(decay_rates(config, h.shape[1]))[:, None] * time)


def windowed(params: dict, n_filters: int, length: int, max_len: int, config) -> np.ndarray:
    """h_n = g_n ⊙ (e^{alpha t} + b), divided by an L1 norm, t = linspace(0, 1, Lmax)."""
    taps = np.float64(params["taps"])
    channels = taps.shape[1]
    alpha = np.float64(params.get("decay", decay_rates(config, channels)))
    b = np.float64(params.get("shift", np.full(channels, config.window_shift)))
    time = np.linspace(0, 1, max_len)
    h = taps * (np.exp(alpha[:, None] * time) + b[:, None])
    if config.norm_axis == "channels":
        h = h / np.abs(h).sum(axis=1, keepdims=True)
    elif config.norm_axis == "length":
        h = h / np.abs(h).sum(axis=2, keepdims=True)
    return h[..., :length]


def explicit(params: dict, n_filters: int, length: int, max_len: int, config) -> np.ndarray:
    """Free taps, then zeros."""
    taps = np.float64(params["taps"])
    h = np.zeros((*taps.shape[:2], max_len))
    h[..., : taps.shape[2]] = taps
    return h[..., :length]


def short(params: dict, n_filters: int, length: int, max_len: int, config) -> np.ndarray:
    """Free taps under a window exp(-r t), r = logspace over the channels and t = linspace(0, 1, Lmax)."""
    h = np.zeros((*params["taps"].shape[:2], max_len))
    h[..., : config.n_taps] = params["taps"]
    if config.decay is not None:
        slow, fast = np.log10(config.decay)
        rates = np.logspace(slow, fast, h.shape[1])
        h = h * np.exp(-rates[:, None] * np.linspace(0, 1, max_len))
    return h[..., :length]


def fno(params: dict, n_filters: int, length: int, max_len: int, config) -> np.ndarray:
    """h_t = (1/Lmax) sum_k c_k Re(X_k e^{2 pi i k t / Lmax}); c_k = 2, but 1 for k = 0 and k = Lmax/2."""
    modes = np.float64(params["modes"])
    h = np.zeros((*modes.shape[:2], length))
    for k in range(modes.shape[2]):
        count = 1 if k == 0 or 2 * k == max_len else 2
        for t in range(length):
            angle = 2 * np.pi * k * t / max_len
            real = modes[:, :, k, 0] * np.cos(angle) - modes[:, :, k, 1] * np.sin(angle)
            h[..., t] += count * real / max_len
    return h


def transfer_function(params: dict, n_filters: int, length: int, max_len: int, config) -> np.ndarray:
    """The inverse DFT of b(z) / a(z) at the Lmax-th roots of unity z, plus lag_zero at lag 0."""
    numerator, denominator = np.float64(params["numerator"]), np.float64(params["denominator"])
    h = np.zeros((*numerator.shape[:2], length))
    for k in range(max_len):
        z = np.exp(-2j * np.pi * k / max_len)
        powers = z ** np.arange(1, numerator.shape[2] + 1)
        ratio = (numerator @ powers) / (1 + denominator @ powers)
        for t in range(length):
            h[..., t] += (ratio * np.exp(2j * np.pi * k * t / max_len)).real / max_len
    h[..., 0] += np.float64(params["lag_zero"])
    return h


def s4d(params: dict, n_filters: int, length: int, max_len: int, config) -> np.ndarray:
    """The impulse response of x <- Abar x + Bbar u, y = 2 Re(C x) (arXiv 2206.11893, section 2)."""
    mode, residue = s4d_modes(params)
    h = np.zeros((*mode.shape[:2], length))
    wave = residue
    for t in range(length):
        h[..., t] = wave.real.sum(-1)
        wave = mode * wave
    return h


def s4d_modes(params: dict) -> tuple[np.ndarray, np.ndarray]:
    """Modes Abar and residues 2 C Bbar of `s4d`, complex [N, D, M]: h_t = Re sum_n residue_n mode_n^t.

    x' = a x + b u in continuous time, in steps of dt by the bilinear rule.
    """
    a = -np.exp(np.float64(params["log_decay"])) + 1j * np.float64(params["frequency"])
    dt = np.exp(np.float64(params["log_dt"]))[..., None]
    a_bar = (1 + dt * a / 2) / (1 - dt * a / 2)
    b_bar = dt * _complex(params["b"]) / (1 - dt * a / 2)
    return a_bar, 2 * _complex(params["c"]) * b_bar


def modal(params: dict, n_filters: int, length: int, max_len: int, config) -> np.ndarray:
    """h_0 free, then Re sum_n R_n lambda_n^{t-1} (arXiv 2310.18780, equation 3.2)."""
    radius = np.exp(-np.exp(np.float64(params["log_decay"])))
    mode = radius * np.exp(1j * np.float64(params["angle"]))
    residue = _complex(params["residue"])
    h = np.zeros((*mode.shape[:2], length))
    h[..., 0] = params["lag_zero"]
    for t in range(1, length):
        h[..., t] = (residue * mode ** (t - 1)).real.sum(-1)
    return h


def real_modal(params: dict, n_filters: int, length: int, max_len: int, config) -> np.ndarray:
    """sum_n R_n e^{p_n t} with real p < 0 (arXiv 2503.01868)."""
    pole, residue = -np.exp(np.float64(params["log_rate"])), np.float64(params["residue"])
    h = np.zeros((*pole.shape[:2], length))
    for t in range(length):
        h[..., t] = (residue * np.exp(pole * t)).sum(-1)
    return h


def lookup(params: dict, n_filters: int, length: int, max_len: int, config) -> np.ndarray:
    """dense(GELU(dense(P_t))), P the table; output d N + o is filter o of channel d."""
    hidden = gelu(dense(params["dense_0"], params["table"].T))
    return _by_filter(dense(params["dense_1"], hidden)[:length], n_filters)


def stu(params: dict, n_filters: int, length: int, max_len: int, config) -> np.ndarray:
    """sum_k phi_k (M_k + (-1)^t M'_k), phi_k = sigma_k^(1/4) e_k of a Hankel matrix (arXiv 2312.06837)."""
    i_plus_j = np.add.outer(np.arange(1.0, max_len + 1), np.arange(1.0, max_len + 1))
    sigma, vectors = np.linalg.eigh(2 / (i_plus_j**3 - i_plus_j))  # ascending
    weights = np.float64(params["weights"])
    alternating = {"separate": params.get("alternating_weights"), "shared": weights, "none": 0 * weights}
    alternating = np.float64(alternating[config.alternating])
    h = np.zeros((*weights.shape[:2], max_len))
    for k in range(config.n_vectors):
        e = vectors[:, -1 - k]
        phi = sigma[-1 - k] ** 0.25 * e * np.sign(e[np.abs(e).argmax()])  # the sign is free
        for t in range(max_len):
            h[..., t] += phi[t] * (weights[..., k] + (-1) ** t * alternating[..., k])
    return h[..., :length]


def positional_features(max_len: int, config) -> np.ndarray:
    """z_t = [t/(Lmax-1), cos(f w_t), -sin(f w_t)], w_t = 2 pi t / Lmax (appendix A.3): [Lmax, emb_dim].

    The published code has f = linspace(1e-4, bands - 1, bands); the annotated variant 0..bands-1, and +sin.
    """
    bands = (config.emb_dim - 1) // 2
    z = np.zeros((max_len, config.emb_dim))
    published = config.features == "published"
    frequencies = np.linspace(1e-4, bands - 1, bands) if published else np.linspace(0, bands - 1, bands)
    for t in range(max_len):
        w = 2 * np.pi * t / max_len
        z[t, 0] = t / max(max_len - 1, 1)
        z[t, 1 : 1 + bands] = np.cos(frequencies * w)
        z[t, 1 + bands :] = -np.sin(frequencies * w) if published else np.sin(frequencies * w)
    return z


def decay_rates(config, channels: int) -> np.ndarray:
    """Window exponents: the window falls to `decay_target` at `slow_decay` .. `fast_decay` of Lmax."""
    slow = np.log(config.decay_target) / config.slow_decay
    fast = np.log(config.decay_target) / config.fast_decay
    return np.linspace(slow, fast, channels)


def _sine_network(params: dict, config) -> np.ndarray:
    """Dense, sin(w x), ..., dense without bias, for the features of every lag [Lmax, D N]."""
    frequency = np.float64(params.get("sine_frequency", config.sine_frequency))
    hidden = np.float64(params["positions"])
    for layer in range(config.n_hidden + 1):
        hidden = np.sin(frequency * dense(params[f"dense_{layer}"], hidden))
    return dense(params[f"dense_{config.n_hidden + 1}"], hidden)


def _by_filter(h: np.ndarray, n_filters: int) -> np.ndarray:
    """[L, D N] -> [N, D, L]."""
    return h.reshape(len(h), -1, n_filters).transpose(2, 1, 0)


def _complex(parts: np.ndarray) -> np.ndarray:
    parts = np.float64(parts)
    return parts[..., 0] + 1j * parts[..., 1]
