"""The files of a checkpoint: their digests, the metadata of their arrays, and arrays written block by block.

    manifest.json    SHA-256 digests of all files, to detect damage
    <item>/          TensorStore's OCDBT database, as Orbax writes it: each array is zarr (version 2), and
                     JSON under NAME/.zarray holds its shape, the shape of its chunks and its dtype

TensorStore allocates whatever this metadata says, so it is compared with the expected arrays first. Knows
pytrees, not models.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from hyena_jax.system import files
from hyena_jax.system.errors import UserError
from hyena_jax.system.files import MANIFEST, open_input, parse_json, read_json
from hyena_jax.system.trees import named_leaves

Tree = Any
Blocks = Callable[[int], Iterable[np.ndarray]]
"""blocks(n) -> an array's rows from the first to the last, n at a time, in the array's dtype."""

ARRAY, OTHER_ARRAY = "/.zarray", "/zarr.json"
"""Ends of keys: an array of zarr version 2, and of version 3, which this package does not write."""
MAX_NUMBERS = 2**24
"""Most numbers of a chunk, and of a block that is in memory at a time."""


def write_manifest(checkpoint: Path) -> None:
    """Writes the digests of all files of a committed checkpoint, in one rename."""
    names = [name for name in _files(checkpoint) if name != MANIFEST]
    digests = {name: _digest(checkpoint / name) for name in names}
    files.write_text(checkpoint / MANIFEST, json.dumps(digests, indent=1))


def is_verified(checkpoint: Path) -> bool:
    """Whether there is a manifest; without one, damage cannot be detected."""
    return (checkpoint / MANIFEST).exists()


def damage_in(checkpoint: Path) -> str | None:
    """The first difference from the manifest, on one line; None if there is none, or no manifest.

    Pipes, devices and links count as damage: Orbax may only open files.
    """
    try:
        files = _files(checkpoint)
        if not is_verified(checkpoint):
            return None
        digests = read_json("manifest", checkpoint / MANIFEST)
        if not isinstance(digests, dict):
            return f"{MANIFEST} is not an object"
        for name, digest in digests.items():
            if name not in files:
                return f"{name} is missing"
            if _digest(checkpoint / name) != digest:
                return f"{name} is not what was saved"
    except (OSError, UserError) as error:
        return str(error)
    return None


def _files(checkpoint: Path) -> list[str]:
    """Names of all files, relative to the folder; UserError if anything in it is not a file or folder."""
    names = []
    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise UserError(f"{name} is not a regular file")
        if path.is_file() and not files.DRAFT.fullmatch(path.name):
            names.append(name)
    return names


def _digest(path: Path) -> str:
    with open_input("file", path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def misfit(store: Callable[[str], dict[str, Any]], targets: dict[str, Tree]) -> str | None:
    """The first difference between the arrays in a checkpoint and `targets`; None if there is none.

    `store(item)` is TensorStore's specification of an item's key-value store; `targets` has for each item a
    tree of arrays or of `jax.ShapeDtypeStruct`.
    """
    try:
        found = (text for item, target in targets.items() for text in _misfits(store(item), item, target))
        return next(found, None)
    except (OSError, ValueError, AttributeError) as error:  # TensorStore's are ValueErrors
        return f"its arrays cannot be read: {error}"


def _misfits(base: dict[str, Any], item: str, target: Tree) -> Iterator[str]:
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    keys = [key.decode(errors="replace") for key in store.list().result()]
    stored = {key.removesuffix(ARRAY) for key in keys if key.endswith(ARRAY)}
    wanted = named_leaves(target, ".")
    others = [key.removesuffix(OTHER_ARRAY) for key in keys if key.endswith(OTHER_ARRAY)]
    for name in [*others, *sorted(stored - {*wanted})]:
        yield f"{item}/{name.replace('.', '/')} is unexpected"
    reads = {name: store.read(name + ARRAY) for name in wanted if name in stored}
    for name, leaf in wanted.items():
        path = f"{item}/{name.replace('.', '/')}"
        if name not in stored:
            yield f"{path} is missing"
            continue
        about = parse_json(reads[name].result().value)
        shape, chunks, dtype = (about.get(key) for key in ("shape", "chunks", "dtype"))
        if shape != list(leaf.shape):
            yield f"{path} is {_shape(shape)}, not {leaf.shape}"
        elif dtype != _zarr_dtype(leaf.dtype):
            yield f"{path} is of dtype {dtype}, not {_zarr_dtype(leaf.dtype)}"
        elif not _are_chunks(chunks, leaf.shape):
            yield f"{path} {leaf.shape} is in chunks of {_shape(chunks)}"


def _are_chunks(chunks: Any, shape: tuple[int, ...]) -> bool:
    """Whether no chunk is larger than the array."""
    if not isinstance(chunks, list) or len(chunks) != len(shape):
        return False
    pairs = zip(chunks, shape, strict=True)
    return all(type(chunk) is int and 1 <= chunk <= max(1, size) for chunk, size in pairs)


def _zarr_dtype(dtype: Any) -> str:
    """The dtype as TensorStore's zarr driver writes it: `<f4`; one unknown to NumPy by name, `bfloat16`."""
    dtype = np.dtype(dtype)
    return dtype.name if dtype.kind == "V" else dtype.newbyteorder("<").str


def _shape(sizes: Any) -> str:
    return str(tuple(sizes)) if isinstance(sizes, list) else repr(sizes)


def replace_arrays(folder: Path, shapes: Tree, blocks: Mapping[str, Blocks]) -> None:
    """Replaces arrays in the folder of an item by those of the full `shapes`, block by block, unflushed.

    `blocks` are by path in the tree `shapes`, such as `blocks_0/mixer/in_proj/kernel`.
    """
    store, leaves = {"driver": "ocdbt", "base": f"file://{folder.absolute()}/"}, named_leaves(shapes)
    # Every block would wait for the disk; the files are flushed once all are written.
    context = ts.Context({"file_io_sync": False})
    for path, make in blocks.items():
        name, shape = path.replace("/", "."), leaves[path].shape
        with as_os_error(f"{path} could not be written"):
            about = ts.KvStore.open(store, context=context).result().read(name + ARRAY).result().value
            n_rows = max(1, min(shape[0], MAX_NUMBERS // max(1, math.prod(shape[1:]))))
            array = ts.open(
                {
                    "driver": "zarr",
                    "kvstore": {**store, "path": f"{name}/"},
                    "metadata": {**parse_json(about), "shape": shape, "chunks": (n_rows, *shape[1:])},
                    # As Orbax does, which refuses a checkpoint in which a block is missing.
                    "store_data_equal_to_fill_value": True,
                },
                context=context,
                create=True,
                delete_existing=True,
            ).result()
        first = 0
        for block in make(n_rows):
            with as_os_error(f"{path} could not be written"):
                array[first : first + len(block)].write(block).result()
            first += len(block)


@contextmanager
def as_os_error(what: str) -> Iterator[None]:
    """Raises any error of the storage layers, such as a full disk, as an OSError."""
    try:
        yield
    except Exception as error:
        reason = str(error).partition(" [")[0]  # without TensorStore's specification of the array
        raise OSError(f"{what}: {reason}") from error
