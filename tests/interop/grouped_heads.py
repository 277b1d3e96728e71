"""Olmo Hybrid with more heads of values than of keys: a folder of random weights, and one of as many of both.

In the second, each head of values has a copy of its head of keys, as transformers makes of the first:
`repeat_interleave(v_heads // k_heads, dim=2)`.
"""

import json

import numpy as np
from references import STORED
from safetensors.numpy import load_file, save_file

WIDTH, KEYS, VALUES, KEY_DIM, VALUE_DIM = 16, 2, 4, 6, 5
LAYERS = {"model.layers.0.": "model.layers.0.", "model.layers.3.": "model.layers.1."}
"""The stored ones that are kept, one of each kind."""


def write_folder(folder, has_copies: bool = False) -> None:
    values = json.loads((STORED / "olmo_hybrid" / "config.json").read_text())
    values |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    values |= {"linear_num_value_heads": VALUES, "linear_value_head_dim": VALUE_DIM}
    values |= {"linear_num_key_heads": VALUES if has_copies else KEYS}
    tensors = {}
    for name, tensor in load_file(STORED / "olmo_hybrid" / "model.safetensors").items():
        layer = next((layer for layer in LAYERS if name.startswith(layer)), "")
        if layer or ".layers." not in name:
            tensors[LAYERS.get(layer, "") + name.removeprefix(layer)] = tensor
    rng, delta = np.random.default_rng(0), "model.layers.0.linear_attn."
    n_keys, n_values = KEYS * KEY_DIM, VALUES * VALUE_DIM
    taps = np.concatenate([tensors.pop(f"{delta}{part}_conv1d.weight") for part in "qkv"])
    parts = dict(zip("qkv", np.split(taps, [n_keys, 2 * n_keys]), strict=True))
    for part, n in (("v", n_values), ("g", n_values), ("a", VALUES), ("b", VALUES)):
        tensors[f"{delta}{part}_proj.weight"] = rng.normal(0, 0.3, (n, WIDTH))
    tensors[f"{delta}o_proj.weight"] = rng.normal(0, 0.3, (WIDTH, n_values))
    tensors[f"{delta}o_norm.weight"] = 1 + rng.normal(0, 0.3, VALUE_DIM)
    for part in ("A_log", "dt_bias"):
        tensors[f"{delta}{part}"] = rng.normal(0, 0.3, VALUES)
    if has_copies:
        for part in "qk":
            parts[part] = copied(parts[part])
            tensors[f"{delta}{part}_proj.weight"] = copied(tensors[f"{delta}{part}_proj.weight"])
    tensors[f"{delta}conv1d.weight"] = np.concatenate(list(parts.values()))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def copied(rows):
    """Rows of channels of keys [H K, ...], each head twice."""
    heads = rows.reshape(KEYS, KEY_DIM, *rows.shape[1:])
    return np.repeat(heads, VALUES // KEYS, axis=0).reshape(-1, *rows.shape[1:])
