"""Olmo Hybrid with more heads of values than of keys: a folder of random weights, and its logits in NumPy.

The logits are computed in float64 from the folder's tensors, as transformers does: it repeats the heads of
queries and keys, `repeat_interleave(v_heads // k_heads, dim=2)`.
"""

import json

import numpy as np
from references import STORED
from safetensors.numpy import load_file, save_file

EPS, DELTA_EPS, LENGTH_EPS = 1e-6, 1e-5, 1e-6
KEYS, VALUES, VALUE_DIM = 2, 4, 5
OTHER_NAMES = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}


def write_folder(folder) -> dict[str, np.ndarray]:
    """Writes config and weights; returns the weights."""
    values = json.loads((STORED / "olmo_hybrid" / "config.json").read_text())
    values |= {"linear_num_value_heads": VALUES, "linear_value_head_dim": VALUE_DIM}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    tensors = load_file(STORED / "olmo_hybrid" / "model.safetensors")
    rng, width, found = np.random.default_rng(0), values["hidden_size"], {}
    shapes = {
        "a_proj.weight": (VALUES, width),
        "b_proj.weight": (VALUES, width),
        "A_log": (VALUES,),
        "dt_bias": (VALUES,),
        "o_norm.weight": (VALUE_DIM,),
        "v_proj.weight": (VALUES * VALUE_DIM, width),
        "g_proj.weight": (VALUES * VALUE_DIM, width),
        "o_proj.weight": (width, VALUES * VALUE_DIM),
    }
    for name, tensor in tensors.items():
        _, is_delta, part = name.partition("linear_attn.")
        found[name] = tensor
        if is_delta and part in shapes:
            noise = rng.normal(0, 0.3, shapes[part]).astype(np.float32)
            found[name] = noise + np.float32(part == "o_norm.weight")
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return found


def logits(tensors: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Logits [B, L, V] of tokens [B, L], float64."""
    found = {name.removeprefix("model."): x.astype(np.float64) for name, x in tensors.items()}
    for old, new in OTHER_NAMES.items():
        found = {name.replace(old, new): x for name, x in found.items()}
    x = found["embed_tokens.weight"][tokens]
    for i in range(4):
        of = {name.removeprefix(f"layers.{i}."): t for name, t in found.items() if f"layers.{i}." in name}
        if "linear_attn.A_log" in of:
            x = x + delta(of, rms(x, of["input_layernorm.weight"]))
            x = x + mlp(of, rms(x, of["post_attention_layernorm.weight"]))
        else:
            x = x + rms(attention(of, x), of["post_attention_layernorm.weight"])
            x = x + rms(mlp(of, x), of["post_feedforward_layernorm.weight"])
    return rms(x, found["norm.weight"]) @ found["lm_head.weight"].T


def rms(x, factor, eps=EPS):
    return factor * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def mlp(of, x):
    gate, up = (x @ of[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate * sigmoid(gate) * up) @ of["mlp.down_proj.weight"].T


def attention(of, x, n_heads=4, n_kv_heads=2):
    q, k, v = (x @ of[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    q, k = (rms(z, of[f"self_attn.{name}_norm.weight"]) for z, name in ((q, "q"), (k, "k")))
    q, k, v = (z.reshape(*x.shape[:2], n, -1) for z, n in ((q, n_heads), (k, n_kv_heads), (v, n_kv_heads)))
    k, v = (np.repeat(z, n_heads // n_kv_heads, axis=2) for z in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    y = np.einsum("bhts,bshd->bthd", weights / weights.sum(axis=-1, keepdims=True), v)
    return y.reshape(*x.shape[:2], -1) @ of["self_attn.o_proj.weight"].T


def delta(of, x):
    of = {name.removeprefix("linear_attn."): t for name, t in of.items()}
    batch, length, _ = x.shape
    taps = np.concatenate([of[f"{name}_conv1d.weight"][:, 0] for name in "qkv"])
    u = x @ np.concatenate([of[f"{name}_proj.weight"] for name in "qkv"]).T
    padded = np.pad(u, ((0, 0), (taps.shape[1] - 1, 0), (0, 0)))
    u = sum(taps[:, j] * padded[:, j : j + length] for j in range(taps.shape[1]))
    n_keys = len(of["q_proj.weight"])
    parts = np.split(u * sigmoid(u), [n_keys, 2 * n_keys], axis=-1)
    heads = len(of["A_log"])
    q, k, v = (z.reshape(batch, length, n, -1) for z, n in zip(parts, (KEYS, KEYS, heads), strict=True))
    q, k = (np.repeat(z, heads // KEYS, axis=2) for z in (q, k))
    q, k = (z / np.sqrt((z**2).sum(axis=-1, keepdims=True) + LENGTH_EPS) for z in (q, k))
    beta = 2 * sigmoid(x @ of["b_proj.weight"].T)
    decay = np.exp(-np.exp(of["A_log"]) * np.log1p(np.exp(x @ of["a_proj.weight"].T + of["dt_bias"])))
    memory, found = np.zeros((batch, heads, q.shape[-1], v.shape[-1])), []
    for t in range(length):
        memory = decay[:, t, :, None, None] * memory
        change = beta[:, t, :, None] * (v[:, t] - np.einsum("bhkv,bhk->bhv", memory, k[:, t]))
        memory = memory + k[:, t, ..., None] * change[..., None, :]
        found.append(np.einsum("bhkv,bhk->bhv", memory, q[:, t]) / np.sqrt(q.shape[-1]))
    o = rms(np.stack(found, axis=1), of["o_norm.weight"], DELTA_EPS)
    gate = (x @ of["g_proj.weight"].T).reshape(o.shape)
    return (o * gate * sigmoid(gate)).reshape(batch, length, -1) @ of["o_proj.weight"].T
