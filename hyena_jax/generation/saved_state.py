"""Saves a model's state after prompts to a file, so that prompts are read once and continued often."""

import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax

from hyena_jax import models
from hyena_jax.config import ModelConfig, UserError, memory_size, open_input, parse_json, require
from hyena_jax.data import npy
from hyena_jax.generation.decoding import Prefilled
from hyena_jax.generation.programs import empty_state
from hyena_jax.generation.prompts import check_prompts
from hyena_jax.training import atomic

FORMAT = 1
MOST_ABOUT = 2**16
"""Most bytes of the description in a file."""


def origin(model_config: ModelConfig, params: optax.Params) -> str:
    """SHA-256 of model and parameters; a state is valid only for these."""
    digest = hashlib.sha256(repr(model_config).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def save(path: Path, prefilled: Prefilled, origin: str) -> None:
    """Writes the state and the tokens read, atomically.

    Raises:
      OSError: if the file cannot be written.
    """
    leaves = jax.device_get(jax.tree.leaves((prefilled.state, prefilled.logits)))
    arrays = {f"leaf_{i}": leaf for i, leaf in enumerate(leaves)}
    arrays |= {f"read_{i}": row for i, row in enumerate(prefilled.read)}
    context = None if prefilled.room is None else prefilled.room + max(map(len, prefilled.read))
    about = {"format": FORMAT, "origin": origin, "rows": len(prefilled.read), "context": context}
    with atomic.replacing(path) as draft, draft.open("wb") as file:
        np.savez(file, about=json.dumps(about), **arrays)


def load(path: Path, model: nn.Module, params: optax.Params, origin: str) -> Prefilled:
    """The state that `save` wrote; shapes are checked against the model before arrays are read.

    Raises:
      UserError: if the file is not a saved state, or belongs to another model or other parameters.
    """
    try:
        with open_input("load_state", path, memory_size()) as file, zipfile.ZipFile(file) as archive:
            return _prefilled(_members(archive), model, params, origin)
    except OtherOrigin as error:
        raise UserError(f"load_state {str(path)!r} belongs to another model or checkpoint") from error
    except MemoryError:
        raise
    except Exception as error:  # zipfile raises many kinds of errors
        if isinstance(error, UserError) and str(error).startswith("load_state"):
            raise
        raise UserError(f"load_state {str(path)!r} cannot be read as a saved state: {error}") from error


class OtherOrigin(Exception):
    """The state belongs to another model or other parameters."""


class Member(NamedTuple):
    """An array in the archive, and how to read it."""

    header: npy.Header
    read: Callable[[], np.ndarray]


def _members(archive: zipfile.ZipFile) -> dict[str, Member]:
    """The arrays by name. None may be compressed, so their sizes are bounded by the archive's."""
    infos = archive.infolist()
    is_plain = all(info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1 for info in infos)
    require(is_plain, "the archive", "another one", "neither compressed nor encrypted")
    require(len({info.filename for info in infos}) == len(infos), "names", "some twice", "different")
    stored = sum(info.file_size for info in infos)
    size = os.fstat(archive.fp.fileno()).st_size
    require(stored <= size, "the archive", f"{stored} bytes in {size}", "as large as its contents")
    return {info.filename.removesuffix(".npy"): _member(archive, info) for info in infos}


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    with archive.open(info) as file:
        header = npy.read_header(info.filename, file, info.file_size)
        start = file.tell()

    def read() -> np.ndarray:
        with archive.open(info) as file:
            file.read(start)  # not `seek`, after which zipfile does not check the checksum
            order = "F" if header.is_fortran else "C"
            return np.frombuffer(file.read(), header.dtype).reshape(header.shape, order=order)

    return Member(header, read)


def _prefilled(members: dict[str, Member], model: nn.Module, params: optax.Params, origin: str) -> Prefilled:
    about = _about(members, origin)
    rows, context = about["rows"], about["context"]
    most = model.config.max_len
    reads = [_checked(members, f"read_{i}", None, np.int32) for i in range(rows)]
    n_read = max(map(len, reads))
    if models.is_unbounded(model):
        require(context is None, "context", context, "None, as the model's state does not grow")
    else:
        require(_is_count(context) and n_read <= context <= most, "context", context, f"in {n_read}..{most}")
    check_prompts(model.config, reads)
    state = jax.eval_shape(lambda: empty_state(model, params, rows, context or most))
    leaves, structure = jax.tree.flatten(state)
    names = {"about"} | {f"read_{i}" for i in range(rows)} | {f"leaf_{i}" for i in range(len(leaves) + 1)}
    require(set(members) == names, "arrays", sorted(set(members) ^ names)[:5], "as in the model's state")
    arrays = [_checked(members, f"leaf_{i}", leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]
    # The model decides the dtype of its logits.
    name = f"leaf_{len(leaves)}"
    dtype = np.dtype(jax.numpy.bfloat16) if members[name].header.dtype.kind == "V" else np.float32
    logits = _checked(members, name, (rows, model.config.vocab_size), dtype)
    room = None if context is None else context - n_read
    return Prefilled(structure.unflatten(map(jax.numpy.asarray, arrays)), logits, tuple(reads), room)


def _about(members: dict[str, Member], origin: str) -> dict[str, Any]:
    """The description in the file."""
    require("about" in members, "the archive", sorted(members)[:5], "one with `about`")
    shape, _, dtype = members["about"].header
    is_text = shape == () and dtype.kind == "U" and dtype.itemsize <= MOST_ABOUT
    require(is_text, "about", f"{dtype} {shape}", "a short text")
    about = parse_json(str(members["about"].read()))
    is_about = isinstance(about, dict) and {"format", "origin", "rows", "context"} <= set(about)
    require(is_about, "about", str(about)[:80], "an object with format, origin, rows and context")
    if about["format"] != FORMAT or about["origin"] != origin:
        raise OtherOrigin
    fits = _is_count(about["rows"]) and about["rows"] <= len(members)
    require(fits, "rows", about["rows"], "as many as the rows that were read")
    return about


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _checked(
    members: dict[str, Member], name: str, shape: tuple[int, ...] | None, dtype: np.dtype
) -> np.ndarray:
    """An array of this shape (None: one-dimensional) and dtype, without NaN."""
    require(name in members, "the archive", sorted(members)[:5], f"one with {name}")
    found, dtype = members[name].header, np.dtype(dtype)
    # NumPy's format cannot name dtypes such as bfloat16.
    is_dtype = found.dtype == (f"V{dtype.itemsize}" if dtype.kind == "V" else dtype)
    fits = is_dtype and (len(found.shape) == 1 if shape is None else found.shape == shape)
    require(
        fits,
        name,
        f"{found.dtype} {found.shape}",
        f"{dtype} {'of one dimension' if shape is None else shape}",
    )
    array = members[name].read().view(dtype)
    require(dtype.kind in "iub" or not np.isnan(array).any(), name, "NaN", "a number everywhere")
    return array
