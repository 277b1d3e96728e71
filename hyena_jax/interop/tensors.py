"""Named tensors in files of other projects, mapped and not loaded: safetensors, PyTorch, Orbax.

Headers are checked against the size of their file before anything is allocated. An index may only name files
next to it, and symbolic links are refused. Nothing in a file is executed.
"""

import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tensorstore as ts

from hyena_jax.system.errors import UserError, printable, require
from hyena_jax.system.files import open_input, open_safetensors, parse_json, read_json

DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes of parameters, as safetensors names them."""
MAX_PICKLE = 2**26
"""Most bytes of the structure of a PyTorch file, which is loaded as a whole."""
STATE = "state_dict"
"""Where Lightning keeps the tensors in a checkpoint."""


class Tensor(NamedTuple):
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: str
    """Its name; a parameter's is one of DTYPES."""
    read: Callable[[], np.ndarray]
    """The tensor, mapped from the file where its format allows it; only for DTYPES."""


Tensors = Mapping[str, Tensor]


def read_tensors(source: Path, allowed_objects: tuple[type, ...] = ()) -> dict[str, Tensor]:
    """The tensors of a file, or of the files in a folder that `transformers` or Orbax wrote.

    Args:
      source: a `.safetensors` file, a PyTorch file, or a folder.
      allowed_objects: classes of objects that a PyTorch file may hold in addition to tensors.
    """
    if not source.is_dir():
        return _read_file(source, allowed_objects)
    if is_orbax(source):
        return read_orbax(source)
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = source / f"{name}.index.json"
        if index.exists():
            return _read_indexed(source, index)
        if (source / name).exists() or (source / name).is_symlink():
            return _read_file(source / name, allowed_objects)
    raise UserError(
        f"source {str(source)!r} holds no weights: a folder must have model.safetensors, pytorch_model.bin,"
        " an index of one of them, or an Orbax checkpoint"
    )


def _read_file(path: Path, allowed_objects: tuple[type, ...]) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    return read_pytorch(path, allowed_objects)


def _read_indexed(folder: Path, index: Path) -> dict[str, Tensor]:
    values = read_json("source", _plain(index))
    names = values.get("weight_map") if isinstance(values, dict) else None
    is_map = isinstance(names, dict) and all(isinstance(file, str) for file in names.values())
    require(is_map, "source", str(index), "an index with a weight_map from tensors to files")
    found: dict[str, Tensor] = {}
    for file in sorted(set(names.values())):
        inside = file not in ("", ".", "..") and Path(file).name == file and "\0" not in file
        allowed = "the name of a file in its folder"
        require(inside, f"a file in {index.name}", printable(file)[:200], allowed)
        tensors = _read_file(folder / file, ())
        twice = found.keys() & tensors.keys()
        if twice:
            raise UserError(f"{folder / file} holds {printable(min(twice))}, which another file holds too")
        found |= tensors
    wrong = sorted(found.keys() ^ names.keys())
    if wrong:
        has, other = (index.name, "the files") if wrong[0] in names else ("a file", index.name)
        raise UserError(f"{folder}: {has} names the tensor {printable(wrong[0])}, which is not in {other}")
    return found


def _plain(path: Path) -> Path:
    """Refuses symbolic links."""
    require(not path.is_symlink(), "source", str(path), "a file, not a symbolic link")
    return path


def metadata_of(path: Path) -> dict[str, str]:
    """The metadata of a `.safetensors` file."""
    with open_safetensors("source", _plain(path)) as file:
        return file.metadata() or {}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` file; reading one maps its bytes alone."""
    with open_safetensors("source", _plain(path)), path.open("rb") as file:
        n_header = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(n_header))

    def tensor(about: Mapping[str, Any]) -> Tensor:
        shape, start = tuple(about["shape"]), 8 + n_header + about["data_offsets"][0]

        def read() -> np.ndarray:
            if math.prod(shape) == 0:
                return np.zeros(shape, DTYPES[about["dtype"]])
            return np.memmap(path, DTYPES[about["dtype"]], "r", start, shape)

        return Tensor(shape, about["dtype"], read)

    return {name: tensor(about) for name, about in header.items() if name != "__metadata__"}


def read_pytorch(path: Path, allowed_objects: tuple[type, ...] = ()) -> dict[str, Tensor]:
    """The tensors of a PyTorch file, under their names or under `state_dict`; read with `weights_only`."""
    try:
        import torch
    except ImportError:
        raise UserError(
            f"source {str(path)!r} needs PyTorch to be read: pip install 'hyena_jax[interop]'"
        ) from None
    with open_input("source", _plain(path)) as file:
        try:
            records = zipfile.ZipFile(file).infolist()
        except Exception:  # the library raises many kinds for damaged files
            records = None
        size = file.seek(0, 2)
    allowed = "a PyTorch file as torch.save writes it since version 1.6"
    require(records is not None, "source", str(path), allowed)
    is_stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
    fits = sum(record.file_size for record in records) <= size
    require(is_stored and fits, "source", str(path), f"{allowed}, without compressed records")
    for record in records:
        is_small = not record.filename.endswith(".pkl") or record.file_size <= MAX_PICKLE
        require(is_small, "source", str(path), f"a file whose structure has at most {MAX_PICKLE} bytes")
    try:
        with torch.serialization.safe_globals(list(allowed_objects)):
            values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the library raises many kinds for damaged files
        refused = re.search(r"Unsupported (?:global|class|operand)[^\n]*?([\w.]+\.[\w.]+)", str(error))
        if refused is None:
            refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        if refused is not None:
            reason = f"it holds {refused[1]}, which is not a tensor and is not loaded"
        else:  # not the library's text, which advises to load without its safeguards
            reason = f"it is damaged ({type(error).__name__})"
        raise UserError(f"{str(path)!r} cannot be read: {printable(reason)[:200]}", "source") from error
    if isinstance(values, dict) and isinstance(values.get(STATE), dict):
        values = values[STATE]
    is_dict = isinstance(values, dict) and all(isinstance(name, str) for name in values)
    require(is_dict, "source", str(path), "a PyTorch file of named tensors")
    # Shared tensors are stored once, and may be named twice.
    return {name: _torch_tensor(value) for name, value in values.items()}


def _torch_tensor(value: Any) -> Tensor:
    import torch

    is_plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized
    if not is_plain:
        return Tensor((), type(value).__name__, lambda: np.zeros(()))
    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    dtype = names.get(value.dtype, str(value.dtype).removeprefix("torch."))

    def read() -> np.ndarray:
        if dtype == "BF16":  # unknown to NumPy, and so to PyTorch's conversion
            return value.detach().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return value.detach().numpy()

    return Tensor(tuple(value.shape), dtype, read)


OCDBT = "manifest.ocdbt"
ARRAY = ".zarray"


def is_orbax(folder: Path) -> bool:
    """Whether a folder is an Orbax checkpoint of a tree."""
    return (folder / OCDBT).exists() or (folder / "_METADATA").exists() or (folder / "checkpoint").exists()


def read_orbax(folder: Path) -> dict[str, Tensor]:
    """The arrays of an Orbax checkpoint in zarr version 2, by their paths joined by dots."""
    for path in folder.rglob("*"):
        _plain(path)
    try:
        about = dict(_zarr_metadata(folder))
        tensors = {name: _zarr_tensor(folder, name, values) for name, values in about.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:  # TensorStore's are ValueErrors
        raise UserError(f"{str(folder)!r} cannot be read: {printable(error)[:200]}", "source") from error
    require(len(tensors) > 0, "source", str(folder), "an Orbax checkpoint with arrays in zarr version 2")
    return tensors


def _zarr_metadata(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What the checkpoint says about each array: in one database, or in a folder for each array."""
    if (folder / OCDBT).exists():
        store = ts.KvStore.open(_database(folder)).result()
        for key in store.list().result():
            name, _, end = key.decode(errors="replace").rpartition("/")
            if end == ARRAY:
                yield name, parse_json(store.read(key).result().value)
    else:
        for path in sorted(folder.glob(f"*/{ARRAY}")):
            yield path.parent.name, read_json("source", path)


def _database(folder: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": f"file://{folder.absolute()}/"}


def _zarr_tensor(folder: Path, name: str, about: Mapping[str, Any]) -> Tensor:
    missing = sorted({"shape", "chunks", "dtype"} - about.keys())
    if missing:
        raise UserError(f"{ARRAY} of {printable(name)} has no {missing[0]}")
    shape, chunks, dtype = tuple(about["shape"]), about["chunks"], about["dtype"]
    pairs = zip(chunks, shape, strict=True)
    is_sized = all(type(x) is int and type(n) is int and 1 <= x <= max(1, n) for x, n in pairs)
    require(is_sized, f"chunks of {printable(name)}", chunks, f"at most its shape {shape}")
    known = {"bfloat16": "BF16", "<f4": "F32", "<f8": "F64", "<f2": "F16"}

    def read() -> np.ndarray:
        if (folder / OCDBT).exists():
            store = {**_database(folder), "path": f"{name}/"}
        else:
            store = {"driver": "file", "path": f"{folder.absolute()}/{name}/"}
        try:
            array = ts.open({"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False}).result()
            return array.read().result()
        except ValueError as error:
            reason = printable(error).partition(" [")[0][:200]
            raise UserError(f"source {str(folder)!r}: {printable(name)} cannot be read: {reason}") from error

    return Tensor(shape, known.get(dtype, str(dtype)), read)
