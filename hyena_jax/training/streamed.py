"""A checkpoint at step 0 that is written array by array, for parameters that do not fit into memory together.

Orbax writes the checkpoint with placeholders of one number for each array; each array is then replaced, in
blocks of rows, by one of its full shape. Knows pytrees, not models.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from hyena_jax.config import parse_json
from hyena_jax.training.checkpoint import Checkpoints, as_os_error
from hyena_jax.training.declared import ARRAY
from hyena_jax.training.manifest import write_manifest
from hyena_jax.trees import named_leaves

Tree = Any
Blocks = Callable[[int], Iterable[np.ndarray]]
"""blocks(n) -> an array's rows from the first to the last, n at a time, in the array's dtype."""

MAX_NUMBERS = 2**24
"""Most numbers of a chunk, and of a block that is in memory at a time."""


class Streamed(NamedTuple):
    """An item of a checkpoint: a tree of shapes, its placeholders, and the blocks of each array."""

    shapes: Tree
    """Arrays or `jax.ShapeDtypeStruct`."""
    placeholders: Tree
    """A NumPy array for each shape, of its rank and dtype."""
    blocks: Mapping[str, Blocks]
    """By path, such as `blocks_0/mixer/in_proj/kernel`; an array that is not named keeps its placeholder."""


def save(folder: Path, items: Mapping[str, Streamed], meta: dict[str, Any]) -> None:
    """Writes the checkpoint of step 0, with its manifest, in a folder without checkpoints.

    Raises:
      OSError: if writing fails.
      Exception: what `blocks` raise; the checkpoint is then incomplete, and must be removed.
    """
    placeholders = {name: item.placeholders for name, item in items.items()}
    with Checkpoints(folder, 1, print) as checkpoints:
        checkpoints.save(0, placeholders, {**meta, "step": 0})
    for name, item in items.items():
        store = {"driver": "ocdbt", "base": f"file://{(folder / '0' / name).absolute()}/"}
        _replace(store, named_leaves(item.shapes), item.blocks)
    _flush(folder / "0")
    write_manifest(folder / "0")


def _replace(store: dict[str, Any], shapes: Mapping[str, Any], blocks: Mapping[str, Blocks]) -> None:
    """Replaces arrays in an item's database by those of the full shapes."""
    # Every block would wait for the disk; the files are flushed once all are written.
    context = ts.Context({"file_io_sync": False})
    for path, make in blocks.items():
        name, shape = path.replace("/", "."), shapes[path].shape
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


def _flush(folder: Path) -> None:
    """Waits until the files of a folder are on the disk."""
    for path in folder.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
