"""A checkpoint at step 0 that is written array by array, for parameters that do not fit into memory together.

Orbax writes the checkpoint with placeholders of one number for each array; each array is then replaced, in
blocks of rows, by one of its full shape. Knows pytrees, not models.
"""

import math
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

MOST_NUMBERS = 2**24
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
    write_manifest(folder / "0")


def _replace(store: dict[str, Any], shapes: Mapping[str, Any], blocks: Mapping[str, Blocks]) -> None:
    """Replaces arrays in an item's database by those of the full shapes.

    Every commit waits for the disk, so that small arrays are committed together.
    """
    context = ts.Context()  # one for all, or each array would be committed separately
    transaction, n_waiting = ts.Transaction(), 0
    for path, make in blocks.items():
        first, array, shape = 0, None, shapes[path].shape
        n_rows = max(1, min(shape[0], MOST_NUMBERS // max(1, math.prod(shape[1:]))))
        for block in make(n_rows):
            with as_os_error(f"{path} could not be written"):
                if array is None or n_waiting + block.size > MOST_NUMBERS:
                    if n_waiting + block.size > MOST_NUMBERS:
                        transaction.commit_sync()
                        transaction, n_waiting = ts.Transaction(), 0
                    name, options = path.replace("/", "."), {"context": context, "transaction": transaction}
                    array = _open(store, name, shape, n_rows, first == 0, options)
                array[first : first + len(block)].write(block).result()
            first, n_waiting = first + len(block), n_waiting + block.size
    with as_os_error("the checkpoint could not be written"):
        transaction.commit_sync()


def _open(
    store: dict[str, Any],
    name: str,
    shape: tuple[int, ...],
    n_rows: int,
    is_new: bool,
    options: dict[str, Any],
) -> ts.TensorStore:
    """An array of a database for writing; a new one takes dtype and compression from its placeholder."""
    spec = {
        "driver": "zarr",
        "kvstore": {**store, "path": f"{name}/"},
        # As Orbax does, which refuses a checkpoint in which a block is missing.
        "store_data_equal_to_fill_value": True,
    }
    if not is_new:
        return ts.open(spec, open=True, **options).result()
    about = parse_json(
        ts.KvStore.open(store, context=options["context"]).result().read(name + ARRAY).result().value
    )
    spec["metadata"] = {**about, "shape": shape, "chunks": (n_rows, *shape[1:])}
    return ts.open(spec, create=True, delete_existing=True, **options).result()
