"""Checkpoints: written by Orbax, verified by a SHA-256 manifest. Knows pytrees, not models.

    checkpoints/<step>/{params,train_state,meta}/   one committed checkpoint
    checkpoints/<step>/manifest.json                SHA-256 digests, written after the commit
    checkpoints/<step>.damaged/                     set aside by a restore
    checkpoints/<step>.unverified/                  the same, if an earlier verified one was used instead

Orbax renames a checkpoint into place once it is whole, but does not notice a bit that flips later. A
checkpoint without a manifest is unverified: its process was killed between commit and manifest. It is used
only if no other checkpoint can be.
"""

import itertools
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from hyena_jax.config import UserError, read_json
from hyena_jax.parallel.processes import from_first, is_first, lost_another
from hyena_jax.training.checkpoint_files import (
    Blocks,
    as_os_error,
    damage_in,
    is_verified,
    misfit,
    replace_arrays,
    write_manifest,
)

Tree = Any

STEP = re.compile("0|[1-9][0-9]*")
"""Names of committed checkpoints."""
TEMPORARY = ".orbax-checkpoint-tmp"
"""Part of the names of folders that Orbax has not committed."""


class Restored(NamedTuple):
    """Items of one checkpoint."""

    step: int
    items: dict[str, Tree]
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, for writing; all processes make the same calls.

    A context manager; leaving it waits for the pending save. Keeps the latest `keep` checkpoints, the newest
    verified one before them, and the one whose meta has the lowest `loss`.
    """

    def __init__(self, folder: Path, keep: int, report: Callable[[str], None]):
        self._folder = folder.resolve()  # it may be a link to a larger disk
        self._keep = keep
        self._report = report
        self._manager: ocp.CheckpointManager | None = None
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        self._quiet = _quiet()
        self._quiet.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if lost_another(error):  # a pending save waits for that process and cannot end
            self._committer.shutdown(wait=False)
            return
        try:
            self._finish()
        finally:
            self._committer.shutdown()
            try:
                if self._manager is not None:
                    with as_os_error("the last checkpoint could not be written"):
                        self._manager.close()
            finally:
                self._quiet.__exit__(kind, error, trace)

    def restore(self, targets: dict[str, Tree]) -> Restored | None:
        """The newest checkpoint that is verified and whole, or None if there are no checkpoints.

        `targets` are trees of arrays or of `jax.ShapeDtypeStruct`; a leaf with a sharding is restored with
        it, however it was sharded when saved, and each process reads only what its devices hold.

        If none is verified, the newest readable one is used and reported. Checkpoints newer than that are
        renamed `<step>.damaged` or `<step>.unverified` and reported: left in place, they would make Orbax
        skip the later save of the same step. Links are renamed too, since Orbax cannot delete them.

        Raises:
          UserError: if there are checkpoints but none can be used; they stay where they are, so that the next
            start is refused too. If one is whole but does not fit the model.
        """
        steps = from_first(lambda: _by_trust(self._folder))
        faults: dict[int, str] = {}
        for step, verified in steps:
            restored = _try_restore(self._folder, step, verified, targets)
            if isinstance(restored, Restored):
                if not verified:
                    self._report(f"checkpoint {step} is unverified ({_UNVERIFIED}) and used: no other can be")
                for line in from_first(lambda step=step: _set_aside(self._folder, step, faults)):
                    self._report(line)
                for line in from_first(lambda step=step: _set_aside_best(self._folder, step)):
                    self._report(line)
                return restored
            faults[step] = restored
        if steps:
            newest = max(faults)
            raise UserError(
                f"every checkpoint in {self._folder} is damaged ({newest}: {faults[newest]}); start over in"
                " a new folder"
            )
        return None

    def save(
        self, step: int, items: dict[str, Tree], meta: dict[str, Any], is_replacing: bool = False
    ) -> None:
        """Saves trees in the background, after any pending save is finished.

        Leaves are NumPy arrays, or arrays over the devices of all processes, which then write them together.
        They are copied from the devices before this returns.

        `meta` is JSON; its `step` is this step, so that a renamed folder is noticed, its `loss` the
        validation loss at this step, or None if it was not evaluated, and `measured_on` names the rows of
        that loss. With `is_replacing`, a checkpoint of this step is deleted first.
        """
        self._finish()
        arguments = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        arguments["meta"] = ocp.args.JsonSave(meta)
        with as_os_error(f"checkpoint {step} could not be written"):
            if self._manager is None:
                options = ocp.CheckpointManagerOptions(
                    preservation_policy=_LatestAndBest(self._folder, self._keep),
                    cleanup_tmp_directories=True,
                )
                self._manager = ocp.CheckpointManager(self._folder.absolute(), options=options)
            if is_replacing:
                self._manager.delete(step)
            if not self._manager.save(step, args=ocp.args.Composite(**arguments), force=True):
                raise OSError(f"Orbax refused to save in {self._folder}")
        self._pending = self._committer.submit(self._commit, self._manager, step)

    def best_loss(self, measured_on: str) -> float:
        """The lowest validation loss of the saved steps on these held-out rows; infinity if there is none."""
        found = Best(*from_first(lambda: best(self._folder)))
        return found.loss if found.measured_on == measured_on else math.inf

    def raise_if_failed(self) -> None:
        """Raises the error of the pending save, if it has failed by now."""
        if self._pending is not None and self._pending.done():
            self._finish()

    def _commit(self, manager: ocp.CheckpointManager, step: int) -> None:
        with as_os_error(f"checkpoint {step} could not be written"):
            manager.wait_until_finished()
            if is_first():
                write_manifest(self._folder / str(step))

    def _finish(self) -> None:
        """Waits for the pending save, and raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences Orbax's thread, whose error is raised where we wait for it, and what a failure interrupts.

    After a failure TensorStore reports to a closed event loop, and Orbax's coroutines are dropped. Reports
    may come late, so after a failure they stay silenced for the rest of the process.
    """
    usual, usual_in_threads = sys.unraisablehook, threading.excepthook

    def report(error: Any) -> None:
        code = getattr(error.object, "cr_code", None)
        is_dropped = code is not None and "orbax" in code.co_filename
        if not is_dropped and str(error.exc_value) != "Event loop is closed":
            usual(error)

    def report_of_thread(error: threading.ExceptHookArgs) -> None:
        if error.thread is None or error.thread.name != "save_finalize":
            usual_in_threads(error)

    sys.unraisablehook, threading.excepthook = report, report_of_thread
    try:
        yield
    finally:
        threading.excepthook = usual_in_threads
    sys.unraisablehook = usual


class _LatestAndBest:
    """Orbax's preservation policy; its own BestN forgets the losses of earlier processes.

    The newest verified checkpoint stays too, since the one being saved gets its manifest only afterwards.
    """

    def __init__(self, folder: Path, keep: int):
        self._folder = folder
        self._keep = keep

    def should_preserve(
        self, checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo], *, context: object
    ) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        verified = (step for step in steps if is_verified(self._folder / str(step)))
        kept = {*sorted(steps)[-self._keep :], max(verified, default=None), best(self._folder).step}
        return [step in kept for step in steps]


def restore_readonly(
    folder: Path, targets: dict[str, Tree], report: Callable[[str], None], step: int | None = None
) -> Restored:
    """The checkpoint of `step`, or the one that `Checkpoints.restore` would use; changes nothing on disk.

    Raises:
      UserError: if there is none, or the requested one is missing or damaged.
    """
    steps = from_first(lambda: _by_trust(folder))
    if step is not None:
        steps = [(saved, verified) for saved, verified in steps if saved == step]
        if not steps:
            raise UserError(f"must be one of the saved {saved_steps(folder)}, got {step}", "step")
    for candidate, verified in steps:
        restored = _try_restore(folder, candidate, verified, targets)
        if isinstance(restored, Restored):
            if not verified:
                report(f"checkpoint {candidate} is unverified ({_UNVERIFIED})")
            for newer, is_other_verified in steps:
                if newer > candidate and verified and not is_other_verified:
                    report(f"checkpoint {newer} is unverified ({_UNVERIFIED}) and not used")
            return restored
        report(f"checkpoint {candidate} is damaged ({restored})")
    if step is not None:
        raise UserError(
            f"must be one of the undamaged of {saved_steps(folder)}, got {step}: {restored}", "step"
        )
    raise UserError(f"{folder} holds no usable checkpoint")


class Best(NamedTuple):
    """The saved step with the lowest validation loss; (None, inf) if no saved step was evaluated."""

    step: int | None
    loss: float
    measured_on: str | None = None
    """The held-out rows of this loss."""


def best(folder: Path) -> Best:
    """The best of the committed checkpoints whose loss was measured on the same rows as the newest loss."""
    metas = [(step, _meta(folder / str(step))) for step in saved_steps(folder)]
    known = [
        Best(step, meta["loss"], meta.get("measured_on"))
        for step, meta in metas
        if meta.get("step") == step and isinstance(meta.get("loss"), float) and math.isfinite(meta["loss"])
    ]
    comparable = [found for found in known if found.measured_on == known[0].measured_on]
    return min(comparable, key=lambda found: found.loss, default=Best(None, math.inf))


def saved_steps(folder: Path) -> list[int]:
    """Committed steps, newest first."""
    if not folder.is_dir():
        return []
    steps = (int(path.name) for path in folder.iterdir() if STEP.fullmatch(path.name))
    return sorted(steps, reverse=True)


_UNVERIFIED = "the run was stopped before its digests were written"


def _by_trust(folder: Path) -> list[tuple[int, bool]]:
    """(step, whether it has a manifest) of saved steps: those with a manifest first, newest first."""
    steps = [(step, is_verified(folder / str(step))) for step in saved_steps(folder)]
    return sorted(steps, key=lambda found: found[1], reverse=True)


def _try_restore(folder: Path, step: int, verified: bool, targets: dict[str, Tree]) -> Restored | str:
    """The items of a checkpoint, or why it cannot be used.

    Raises:
      UserError: if the files are as they were saved but do not fit: the model changed.
    """
    checkpoint = folder / str(step)
    fault = from_first(lambda: _fault(checkpoint))
    if fault is not None:
        return fault
    unfit = from_first(lambda: misfit(checkpoint, targets))
    if unfit is None:
        arguments = {name: ocp.args.StandardRestore(target) for name, target in targets.items()}
        try:
            with _quiet(), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                restored = checkpointer.restore(
                    checkpoint.absolute(), args=ocp.args.Composite(**arguments, meta=ocp.args.JsonRestore())
                )
            items = {name: restored[name] for name in targets}
            if list(map(np.shape, jax.tree.leaves(items))) == list(map(np.shape, jax.tree.leaves(targets))):
                return Restored(step, items, restored["meta"])
            unfit = "the tree of its arrays differs"
        except Exception as error:  # Orbax and its storage layer raise many kinds for unusable files
            unfit = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    fault = _fault(checkpoint)  # once more: a run that goes on may have deleted it meanwhile
    if fault is not None:
        return fault
    if verified:
        raise UserError(f"{checkpoint} is whole, but does not fit this model: {unfit}")
    return unfit


def _fault(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used, judging by its files; None if it can."""
    if checkpoint.is_symlink():
        return "it is a symbolic link"
    if not checkpoint.is_dir():
        return "it is not a folder"
    found = damage_in(checkpoint)
    if found is None and _meta(checkpoint).get("step") != int(checkpoint.name):
        return f"it is a checkpoint of step {_meta(checkpoint).get('step')!r}"
    return found


def _set_aside(folder: Path, step: int, faults: dict[int, str]) -> list[str]:
    """Renames checkpoints newer than `step`, and links; returns a line about each."""
    lines = []
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and TEMPORARY in path.name:
            path.unlink()  # Orbax would delete this name, which fails for links
        elif STEP.fullmatch(path.name) and (int(path.name) > step or path.is_symlink()):
            why = faults.get(int(path.name), "it is a symbolic link" if path.is_symlink() else None)
            lines.append(_rename(path, "unverified" if why is None else "damaged", why or _UNVERIFIED))
    return lines


def _set_aside_best(folder: Path, step: int) -> list[str]:
    """Renames best checkpoints that are damaged, until the best is `step` or whole; a line about each."""
    lines = []
    while (found := best(folder).step) not in (None, step):
        fault = _fault(folder / str(found))
        if fault is None:
            break
        lines.append(_rename(folder / str(found), "damaged", fault))
    return lines


def _rename(path: Path, kind: str, why: str) -> str:
    """Sets a checkpoint aside under a free name; returns a line about it."""
    names = (f"{path.name}.{kind}" + (f".{i}" if i else "") for i in itertools.count())
    free = next(name for name in names if not os.path.lexists(path.with_name(name)))
    path.rename(path.with_name(free))
    return f"checkpoint {path.name} is {kind}: set aside as {free} ({why})"


def _meta(checkpoint: Path) -> dict[str, Any]:
    try:
        meta = read_json("metadata", checkpoint / "meta" / "metadata")
        return meta if isinstance(meta, dict) else {}
    except UserError:
        return {}


class Streamed(NamedTuple):
    """An item of a checkpoint: a tree of shapes, its placeholders, and the blocks of each array."""

    shapes: Tree
    """Arrays or `jax.ShapeDtypeStruct`."""
    placeholders: Tree
    """A NumPy array for each shape, of its rank and dtype, of one number."""
    blocks: Mapping[str, Blocks]
    """By path, such as `blocks_0/mixer/in_proj/kernel`; an array that is not named keeps its placeholder."""


def save_streamed(folder: Path, items: Mapping[str, Streamed], meta: dict[str, Any]) -> None:
    """Writes the checkpoint of step 0, with its manifest, array by array, in a folder without checkpoints.

    For parameters that do not fit into memory together: Orbax writes placeholders, and each array is then
    replaced, in blocks of rows, by one of its full shape.

    Raises:
      OSError: if writing fails.
      Exception: what `blocks` raise; the checkpoint is then incomplete, and must be removed.
    """
    placeholders = {name: item.placeholders for name, item in items.items()}
    with Checkpoints(folder, 1, print) as checkpoints:
        checkpoints.save(0, placeholders, {**meta, "step": 0})
    for name, item in items.items():
        replace_arrays(folder / "0" / name, item.shapes, item.blocks)
    for path in (folder / "0").rglob("*"):  # until the files are on the disk
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    write_manifest(folder / "0")
