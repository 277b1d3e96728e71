"""Models around given mixers: norms, feed-forward layers, blocks, embeddings and heads.

Axes: B batch, L length, D channels, V vocabulary. `params` are the nested dictionaries of the modules in
`hyena_jax.models`, as NumPy arrays, and `config` is their config. Mixers are arguments: functions
`mixers[i](params, x [B, L, D]) -> y [B, L, D]`, one for each mixer of the pattern.
"""

import math

import numpy as np


def language_model(params: dict, tokens: np.ndarray, config, mixers: list) -> np.ndarray:
    """Logits [B, L, V] of tokens [B, L]."""
    table = np.float64(params["embedding"]["embedding"])
    x = table[tokens]
    if config.scale_embedding:
        scale = np.sqrt(config.d_model)
        x = x * (rounded_to_bfloat16(scale) if config.round_embedding_scale else scale)
    if config.learned_positions:
        x = x + np.float64(params["positions"])[: tokens.shape[1]]
    x = backbone(params, x, config, mixers)
    x = norm(params.get("final_norm"), x, config.final_norm, config.norm_eps)
    logits = x @ table.T if config.tied_head else dense(params["head"], x)
    logits = logits[..., : config.vocab_size]
    if config.soft_cap is not None:
        logits = config.soft_cap * np.tanh(logits / config.soft_cap)
    return logits


def image_classifier(params: dict, images: np.ndarray, config, mixers: list) -> np.ndarray:
    """Logits [B, n_classes], or [B, L, n_classes] by patch, of images [B, height, width, colours]."""
    x = patches(params["patches"], images, config.patch_size)
    if config.learned_positions:
        x = x + np.float64(params["positions"])
    x = backbone(params, x, config, mixers)
    x = norm(params.get("final_norm"), x, config.final_norm, config.norm_eps)
    if config.head == "average_pool":
        x = x.mean(axis=1)
    return dense(params["head"], x)


def autoencoder(params: dict, tokens: np.ndarray, config, mixers: list) -> np.ndarray:
    """Logits [B, L, V] of tokens [B, L], reconstructed from the last position's output."""
    x = np.float64(params["embedding"]["embedding"])[tokens]
    length, half = tokens.shape[1], config.d_model // 2
    if config.learned_positions:
        x = x + np.float64(params["positions"])[:length]
    last = backbone(params, x, config, mixers)[:, -1]
    logits = []
    for t in range(length):
        angles = [t / 10_000 ** (k / (half - 1)) for k in range(half)]
        z = last + np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
        for i in range(2):
            z = norm(params.get(f"decoder_norms_{i}"), z, config.final_norm, config.norm_eps)
            z = gelu(dense(params[f"decoder_{i}"], z))
        z = norm(params.get("final_norm"), z, config.final_norm, config.norm_eps)
        logits.append(dense(params["head"], z))
    return np.stack(logits, axis=1)


def patches(params: dict, images: np.ndarray, patch_size: tuple[int, int]) -> np.ndarray:
    """A linear map of the pixels of each patch [B, L, D], row by row; incomplete patches are dropped."""
    height, width = patch_size
    kernel = np.float64(params["kernel"])  # [height, width, colours, D]
    embedded = []
    for top in range(0, images.shape[1] - height + 1, height):
        for left in range(0, images.shape[2] - width + 1, width):
            patch = np.float64(images[:, top : top + height, left : left + width])
            embedded.append(np.einsum("bhwc,hwcd->bd", patch, kernel) + np.float64(params["bias"]))
    return np.stack(embedded, axis=1)


def backbone(params: dict, x: np.ndarray, config, mixers: list) -> np.ndarray:
    """All blocks in order; the pattern of mixers repeats."""
    for i in range(config.n_layers):
        ffn = config.first_ffn if i == 0 and config.first_ffn else config.ffn
        x = block(params[f"blocks_{i}"], x, config, ffn, mixers[i % len(mixers)])
    return x


def block(params: dict, x: np.ndarray, config, ffn: str, mixer) -> np.ndarray:
    """x <- x + mixer(norm(x)), x <- x + ffn(norm(x)); or only the mixer if not residual."""
    y = mixer(params["mixer"], norm(params.get("mixer_norm"), x, config.norm, config.norm_eps))
    if not config.residual:
        return y
    x = x + y
    if ffn == "none":
        return x
    return x + feed_forward(params["mlp"], norm(params.get("mlp_norm"), x, config.norm, config.norm_eps), ffn)


def feed_forward(params: dict, x: np.ndarray, kind: str) -> np.ndarray:
    """Dense, activation, dense; gated forms multiply f(one dense) with another dense."""
    hidden = dense(params["in_proj"], x)
    if kind == "gelu":
        hidden = gelu(hidden)
    elif kind == "gelu_tanh":
        hidden = gelu_tanh(hidden)
    elif kind == "relu":
        hidden = np.maximum(hidden, 0)
    elif kind == "geglu":
        hidden = gelu_tanh(dense(params["gate_proj"], x)) * hidden
    elif kind == "geglu_erf":
        hidden = gelu(dense(params["gate_proj"], x)) * hidden
    elif kind == "swiglu":
        gate = dense(params["gate_proj"], x)
        hidden = gate / (1 + np.exp(-gate)) * hidden
    elif kind == "bilinear":
        hidden = dense(params["gate_proj"], x) * hidden
    return dense(params["out_proj"], hidden)


def norm(params: dict | None, x: np.ndarray, kind: str, eps: float | None = None) -> np.ndarray:
    """LayerNorm, RMSNorm with factor 1 + scale, its form with eps outside the root, or nothing."""
    if kind == "layer":
        centred = x - x.mean(axis=-1, keepdims=True)
        y = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + (1e-5 if eps is None else eps))
        return y * np.float64(params["scale"]) + np.float64(params["bias"])
    eps = 1e-6 if eps is None else eps
    mean_square = (x**2).mean(axis=-1, keepdims=True)
    if kind == "rms":
        return x / np.sqrt(mean_square + eps) * (1 + np.float64(params["scale"]))
    if kind == "rms_eps_outside":
        return x / (np.sqrt(mean_square) + eps) * (1 + np.float64(params["scale"]))
    return x


def rounded_to_bfloat16(x: float) -> float:
    """The nearest number with 8 bits of precision; a tie goes to the even one."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 2**8), exponent - 8)


def gelu(x: np.ndarray) -> np.ndarray:
    """x Phi(x), Phi the normal distribution function."""
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """The tanh approximation of `gelu`."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def dense(params: dict, x: np.ndarray) -> np.ndarray:
    """x W + b, or x W if the layer has no bias."""
    y = x @ np.float64(params["kernel"])
    return y + np.float64(params["bias"]) if "bias" in params else y
