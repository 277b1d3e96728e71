"""Compares the arrays that a checkpoint declares with the expected ones, before anything is allocated.

Orbax keeps each array as zarr (version 2) in TensorStore's OCDBT database: JSON under NAME/.zarray holds its
shape, the shape of its chunks and its dtype. TensorStore allocates whatever is declared there.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from hyena_jax.config import parse_json
from hyena_jax.trees import named_leaves

Tree = Any

ARRAY, OTHER_ARRAY = "/.zarray", "/zarr.json"
"""Ends of keys: an array of zarr version 2, and of version 3, which this package does not write."""


def misfit(folder: Path, targets: dict[str, Tree]) -> str | None:
    """The first difference between the arrays in a checkpoint's folder and `targets`; None if there is none.

    Args:
      targets: for each item, a tree of arrays or of `jax.ShapeDtypeStruct`.
    """
    try:
        found = (text for item, target in targets.items() for text in _misfits(folder, item, target))
        return next(found, None)
    except (OSError, ValueError, AttributeError) as error:  # TensorStore's are ValueErrors
        return f"its arrays cannot be read: {error}"


def _misfits(folder: Path, item: str, target: Tree) -> Iterator[str]:
    base = {"driver": "file", "path": f"{(folder / item).absolute()}/"}
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
