"""The files of checkpoints in a folder: which there are, whether they are whole, what is in them.

    checkpoints/<step>/manifest.json   SHA-256 digests of all files, written after the commit
    checkpoints/<step>/revised.json    its meta, where that was completed later
    checkpoints/<step>/<item>/         TensorStore's OCDBT database, as Orbax writes it: each array is zarr
                                       (version 2), and JSON under NAME/.zarray holds its shape, the shape of
                                       its chunks and its dtype
    checkpoints/<step>.damaged/        set aside by a restore
    checkpoints/<step>.unverified/     the same, if an earlier verified one was used instead

A checkpoint without a manifest is unverified: its process was killed between commit and manifest. It is used
only if no other checkpoint can be. TensorStore allocates whatever the metadata of arrays says, so it is
compared with the expected arrays first. Knows pytrees, not models.
"""

import errno
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from hyena_jax.system import files
from hyena_jax.system.errors import UserError
from hyena_jax.system.files import MANIFEST, STEP_FOLDER, open_input, parse_json, read_json
from hyena_jax.system.trees import named_leaves

Tree = Any
Blocks = Callable[[int], Iterable[np.ndarray]]
"""blocks(n) -> an array's rows from the first to the last, n at a time, in the array's dtype."""

ARRAY, OTHER_ARRAY = "/.zarray", "/zarr.json"
"""Ends of keys: an array of zarr version 2, and of version 3, which this package does not write."""
MAX_NUMBERS = 2**24
"""Most numbers of a chunk, and of a block that is in memory at a time."""
TEMPORARY = ".orbax-checkpoint-tmp"
"""Part of the names of folders that Orbax has not committed."""
REVISED = "revised.json"
OF_MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE}  # say nothing of a file
UNVERIFIED = "the run was stopped before its digests were written"


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

    Pipes, devices and links count as damage: Orbax may only open files. An error that is the machine's, and
    not the checkpoint's, is raised as an OSError.
    """
    try:
        files = _files(checkpoint)
        if not is_verified(checkpoint):
            return None
        digests = read_json("manifest", checkpoint / MANIFEST)
        if not isinstance(digests, dict):
            return f"{MANIFEST} is not an object"
        if "objects" in digests:
            return f"{MANIFEST} is of a run in a bucket, which goes on there (gs://...), not in a copy"
        for name, digest in digests.items():
            if name not in files:
                return f"{name} is missing"
            if _digest(checkpoint / name) != digest:
                return f"{name} is not what was saved"
    except (OSError, UserError) as error:
        if getattr(error.__cause__ or error, "errno", None) in OF_MACHINE:
            raise OSError(f"{checkpoint} cannot be read: {error}") from error
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


class LocalSteps:
    """The committed checkpoints in a folder."""

    deletes = False
    """Whether those that are kept no longer are removed by a method `delete`; Orbax does it here."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    def path(self, step: int | None = None) -> Path:
        """Where Orbax finds a checkpoint; without a step, the folder of all."""
        return self._folder.absolute() / ("" if step is None else str(step))

    def store(self, step: int, item: str) -> dict[str, Any]:
        """TensorStore's specification of the files of an item."""
        return {"driver": "file", "path": f"{self.path(step) / item}/"}

    def saved(self) -> list[int]:
        """Committed steps, newest first."""
        if not self._folder.is_dir():
            return []
        steps = (int(path.name) for path in self._folder.iterdir() if STEP_FOLDER.fullmatch(path.name))
        return sorted(steps, reverse=True)

    def is_verified(self, step: int) -> bool:
        """Whether damage would be noticed."""
        return is_verified(self._folder / str(step))

    def meta(self, step: int) -> dict[str, Any]:
        """The meta of a checkpoint; empty if it cannot be read."""
        for name in (REVISED, "meta/metadata"):
            with suppress(UserError):
                meta = read_json("metadata", self._folder / str(step) / name)
                if isinstance(meta, dict):
                    return meta
        return {}

    def fault(self, step: int) -> str | None:
        """Why a checkpoint cannot be used, judging by its files; None if it can."""
        checkpoint = self._folder / str(step)
        if checkpoint.is_symlink():
            return "it is a symbolic link"
        if not checkpoint.is_dir():
            return "it is not a folder"
        found = damage_in(checkpoint)
        if found is None and self.meta(step).get("step") != step:
            return f"it is a checkpoint of step {self.meta(step).get('step')!r}"
        return found

    def begin(self) -> None:
        """Called before the first checkpoint is read or written by the run's owner."""

    def commit(self, step: int) -> None:
        """Writes the manifest of a checkpoint that Orbax has committed."""
        write_manifest(self._folder / str(step))

    def revise(self, step: int, meta: Mapping[str, Any]) -> None:
        """Replaces the meta of a checkpoint; a kill between the two files leaves it without a digest."""
        checkpoint = self._folder / str(step)
        files.write_text(checkpoint / REVISED, json.dumps(meta))
        if is_verified(checkpoint):
            digests = read_json("manifest", checkpoint / MANIFEST) | {REVISED: _digest(checkpoint / REVISED)}
            files.write_text(checkpoint / MANIFEST, json.dumps(digests, indent=1))

    def set_aside(self, step: int, faults: Mapping[int, str]) -> list[str]:
        """Renames checkpoints newer than `step`, and links; returns a line about each."""
        lines = []
        for path in sorted(self._folder.iterdir()):
            if path.is_symlink() and TEMPORARY in path.name:
                path.unlink()  # Orbax would delete this name, which fails for links
            elif STEP_FOLDER.fullmatch(path.name) and (int(path.name) > step or path.is_symlink()):
                why = faults.get(int(path.name), "it is a symbolic link" if path.is_symlink() else None)
                lines.append(self.drop(int(path.name), why))
        return lines

    def drop(self, step: int, why: str | None) -> str:
        """Renames a checkpoint that is damaged, or unverified if there is no `why`; a line about it."""
        path, kind = self._folder / str(step), "unverified" if why is None else "damaged"
        names = (f"{path.name}.{kind}" + (f".{i}" if i else "") for i in itertools.count())
        free = next(name for name in names if not os.path.lexists(path.with_name(name)))
        path.rename(path.with_name(free))
        return f"checkpoint {path.name} is {kind}: set aside as {free} ({why or UNVERIFIED})"
