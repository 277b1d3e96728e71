"""Models around given mixers: nothing but NumPy.

Axes: B batch, L length, D channels, V vocabulary. `params` are the nested dictionaries of the modules in
`hyena_jax.models`, as NumPy arrays, and `config` is their config. Mixers are arguments: functions
`mixers[i](params, x [B, L, D]) -> y [B, L, D]`, one for each mixer of the pattern.
"""

import math

import numpy as np

from hyena_jax.reference.layers import ACTIVATIONS, dense, gelu, norm

# The activation of the gate, for each kind of feed-forward layer that has one.
GATES = {"geglu": "gelu_tanh", "geglu_erf": "gelu", "swiglu": "silu", "bilinear": "none"}


def language_model(params: dict, tokens: np.ndarray, config, mixers: list) -> np.ndarray:
    """Logits [B, L, V] of tokens [B, L]."""
    table = np.float64(params["embedding"]["embedding"])
    x = table[tokens]
    if config.scale_embedding:
        scale = np.sqrt(config.d_model)
        x = x * (rounded_to_bfloat16(scale) if config.round_embedding_scale else scale)
    if config.learned_positions:
        x = x + np.float64(params["positions"])[: tokens.shape[1]]
    x = norm(params.get("embedding_norm"), x, config.embedding_norm, config.norm_eps)
    x = backbone(params, x, config, mixers)
    x = norm(params.get("final_norm"), x, config.final_norm, config.norm_eps)
    logits = x @ table.T if config.tied_head else dense(params["head"], x)
    logits = config.logit_scale * logits[..., : config.vocab_size]
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
        place = config.norm_places[i % len(config.norm_places)]
        x = block(params[f"blocks_{i}"], x, config, ffn, mixers[i % len(mixers)], place)
    return x


def block(params: dict, x: np.ndarray, config, ffn: str, mixer, norm_place: str = "before") -> np.ndarray:
    """x <- x + mixer(norm(x)), x <- x + ffn(norm(x)); or only the mixer if not residual.

    With norm_place "after", x <- x + norm(mixer(x)), x <- x + norm(ffn(x)).
    """
    if norm_place == "after":
        y = norm(params["mixer_norm"], mixer(params["mixer"], x), config.norm, config.norm_eps)
        x = x + y
        if ffn == "none":
            return x
        y = feed_forward(params["mlp"], shifted(params, x, config), ffn)
        return x + norm(params["mlp_norm"], y, config.norm, config.norm_eps)
    y = mixer(params["mixer"], norm(params.get("mixer_norm"), x, config.norm, config.norm_eps))
    if not config.residual:
        return y
    x = x + y
    if ffn == "none":
        return x
    u = norm(params.get("mlp_norm"), x, config.norm, config.norm_eps)
    return x + feed_forward(params["mlp"], shifted(params, u, config), ffn)


def shifted(params: dict, u: np.ndarray, config) -> np.ndarray:
    """With ffn_shift, u mixed with the token before, channel by channel."""
    if not config.ffn_shift:
        return u
    before = np.concatenate([np.zeros_like(u[:, :1]), u[:, :-1]], axis=1)
    return u + np.float64(params["mlp_shift"]["mu"]) * (before - u)


def feed_forward(params: dict, x: np.ndarray, kind: str) -> np.ndarray:
    """Dense, activation, dense; gated forms multiply f(one dense) with another dense."""
    hidden = dense(params["in_proj"], x)
    if kind in GATES:
        hidden = ACTIVATIONS[GATES[kind]](dense(params["gate_proj"], x)) * hidden
    else:
        hidden = ACTIVATIONS[kind](hidden)
    return dense(params["out_proj"], hidden)


def rounded_to_bfloat16(x: float) -> float:
    """The nearest number with 8 bits of precision; a tie goes to the even one."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 2**8), exponent - 8)
