"""A model's state after prompts, in a file: read once, continued often."""

import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

from hyena_jax.config import ModelConfig, UserError
from hyena_jax.generation.decoding import Prompted
from hyena_jax.generation.programs import empty_state

FORMAT = 1


def origin(model_config: ModelConfig, params: optax.Params) -> str:
    """SHA-256 of model and parameters: a state belongs to these alone."""
    digest = hashlib.sha256(repr(model_config).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def save(path: Path, prompted: Prompted, origin: str) -> None:
    """Writes what was read, in one rename.

    Raises:
      OSError: if the file cannot be written.
    """
    leaves = jax.device_get(jax.tree.leaves((prompted.state, prompted.logits)))
    arrays = {f"leaf_{i}": leaf for i, leaf in enumerate(leaves)}
    arrays |= {f"read_{i}": row for i, row in enumerate(prompted.read)}
    context = None if prompted.room is None else prompted.room + max(map(len, prompted.read))
    about = {"format": FORMAT, "origin": origin, "rows": len(prompted.read), "context": context}
    draft = path.with_name(f"{path.name}.draft")
    with draft.open("wb") as file:
        np.savez(file, about=json.dumps(about), **arrays)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def load(path: Path, model: nn.Module, params: optax.Params, origin: str) -> Prompted:
    """Reads what `save` wrote.

    Raises:
      UserError: if the file is none, or of another model or other parameters.
    """
    if not zipfile.is_zipfile(path):
        raise UserError(f"load_state {str(path)!r} cannot be read: it is no saved state")
    try:
        with np.load(path, allow_pickle=False) as file:
            return _prompted(file, path, model, params, origin)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"load_state {str(path)!r} cannot be read: {error}") from error


def _prompted(file: Any, path: Path, model: nn.Module, params: optax.Params, origin: str) -> Prompted:
    about = json.loads(str(file["about"]))
    if about["format"] != FORMAT or about["origin"] != origin:
        raise UserError(f"load_state {str(path)!r} is of another model or checkpoint")
    read = tuple(file[f"read_{i}"] for i in range(about["rows"]))
    context = about["context"]
    state = jax.eval_shape(lambda: empty_state(model, params, about["rows"], context or model.config.max_len))
    leaves, structure = jax.tree.flatten(state)
    arrays = [file[f"leaf_{i}"] for i in range(len(leaves) + 1)]
    for leaf, array in zip(leaves, arrays, strict=False):
        if (leaf.shape, leaf.dtype) != (array.shape, array.dtype):
            raise ValueError(f"an array is {array.dtype} {array.shape}, not {leaf.dtype} {leaf.shape}")
    room = None if context is None else context - max(map(len, read))
    return Prompted(structure.unflatten(map(jax.numpy.asarray, arrays[:-1])), arrays[-1], read, room)
