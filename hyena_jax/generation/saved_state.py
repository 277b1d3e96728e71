"""Saves a model's state after prompts to a file, so that prompts are read once and continued often.

It is a safetensors file of the leaves of a `Prefilled`, named by their paths: `logits`, `read/0`,
`state/shared/position`. Its metadata are one text of JSON.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors import safe_open

from hyena_jax import models
from hyena_jax.config import ModelConfig
from hyena_jax.generation.decoding import Prefilled
from hyena_jax.generation.programs import empty_state
from hyena_jax.generation.prompts import check_prompts
from hyena_jax.system import files
from hyena_jax.system.errors import UserError, printable, require
from hyena_jax.system.files import memory_size, open_input, open_safetensors, parse_json
from hyena_jax.system.trees import named_leaves

FORMAT = 2
MAX_ABOUT = 2**10
"""Most characters of the text in the metadata."""


def origin(model_config: ModelConfig, params: optax.Params) -> str:
    """SHA-256 of model and parameters; a state is valid only for these."""
    digest = hashlib.sha256(repr(model_config).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def save_state(path: Path, prefilled: Prefilled, origin: str) -> None:
    """Writes the state and the tokens read, to a new file, atomically; equal ones give equal files."""
    room, rows = prefilled.room, prefilled.read
    context = None if room is None else room + max(map(len, rows))
    about = {"format": FORMAT, "origin": origin, "rows": len(rows), "context": context}
    arrays = named_leaves(jax.device_get(prefilled._replace(room=None)))
    about["sha256"] = _digest(about, arrays)
    with files.replacing(path, is_new=True) as draft:
        files.write_safetensors(draft, arrays, {"saved_state": json.dumps(about)})


def load_state(path: Path, model: nn.Module, params: optax.Params, origin: str) -> Prefilled:
    """The state that `save_state` wrote; one of another model or `origin` is refused before it is read."""
    with open_input("load_state", path, memory_size()) as file:
        if file.read(4) == b"PK\x03\x04":  # a zip archive, as format 1 was
            again = "read the prompts again and save their state"
            raise UserError(f"load_state {str(path)!r} was saved by an earlier version, in format 1; {again}")
    with open_safetensors("load_state", path) as file:
        try:
            return _prefilled(file, _about(file, origin), model, params)
        except UserError as error:
            raise UserError(
                f"{str(path)!r} cannot be read as a saved state: {error}", "load_state"
            ) from error


def _about(file: safe_open, origin: str) -> dict[str, Any]:
    text = (file.metadata() or {}).get("saved_state", "")
    require(0 < len(text) <= MAX_ABOUT, "saved_state in the metadata", text[:80], "a short text")
    about = parse_json(text)
    is_about = isinstance(about, dict) and about.keys() == {"format", "origin", "rows", "context", "sha256"}
    require(is_about, "saved_state", about, "an object with format, origin, rows, context and sha256")
    require(about["format"] == FORMAT, "format", about["format"], str(FORMAT))
    if about["origin"] != origin:
        raise UserError("it belongs to another model or checkpoint")
    return about


def _prefilled(file: safe_open, about: dict[str, Any], model: nn.Module, params: optax.Params) -> Prefilled:
    shapes = _shapes(file, about, model, params)
    wanted = {name: f"{_dtype_name(x.dtype)} {[*x.shape]}" for name, x in named_leaves(shapes).items()}
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    found = {name: f"{x.get_dtype()} {x.get_shape()}" for name, x in slices.items()}
    for name in sorted(wanted.keys() | found.keys()):
        must, got = wanted.get(name, "absent"), found.get(name, "absent")
        require(got == must, printable(name)[:80], got[:80], must)
    arrays = {name: file.get_tensor(name) for name in wanted}
    stored, digest = about.pop("sha256"), _digest(about, arrays)
    require(digest == stored, "the SHA-256 of the contents", digest, repr(stored))
    for name, array in arrays.items():
        require(not np.isnan(array).any(), name, "NaN", "a number everywhere")
    state, logits, read, _ = jax.tree.unflatten(jax.tree.structure(shapes), arrays.values())
    check_prompts(model.config, read)
    room = None if about["context"] is None else about["context"] - max(map(len, read))
    return Prefilled(jax.device_put(state), logits, read, room)


def _shapes(file: safe_open, about: dict[str, Any], model: nn.Module, params: optax.Params) -> Prefilled:
    rows, context, most = about["rows"], about["context"], model.config.max_len
    n_arrays = len(file.keys())
    require(type(rows) is int and 1 <= rows <= n_arrays, "rows", rows, f"in 1..{n_arrays}")
    lengths = [math.prod(file.get_slice(f"read/{i}").get_shape()) for i in range(rows)]
    least = max(lengths)
    if models.is_unbounded(model):
        require(context is None, "context", context, "None, as the model's state does not grow")
    else:
        fits = type(context) is int and least <= context <= most
        require(fits, "context", context, f"in {least}..{most}")
    state = jax.eval_shape(lambda: empty_state(model, params, rows, context or most))
    # The model decides the dtype of its logits.
    dtype = jnp.bfloat16 if file.get_slice("logits").get_dtype() == "BF16" else jnp.float32
    logits = jax.ShapeDtypeStruct((rows, model.config.vocab_size), dtype)
    return Prefilled(state, logits, tuple(jax.ShapeDtypeStruct((n,), jnp.int32) for n in lengths), room=None)


def _dtype_name(dtype: np.dtype) -> str:
    """The name of a dtype in safetensors, such as F32, C64, I32 or BF16."""
    names = {"bfloat16": "BF16", "bool": "BOOL"}
    return names.get(dtype.name, f"{dtype.kind}{8 * dtype.itemsize}".upper())


def _digest(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of what the metadata say, and of the arrays' names, dtypes, shapes and contents."""
    digest = hashlib.sha256(json.dumps(about).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()
