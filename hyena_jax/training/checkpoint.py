"""Checkpoints: Orbax writes them, a SHA-256 manifest proves them. Knows pytrees, not models.

    checkpoints/<step>/{params,train_state,meta}/   one committed checkpoint
    checkpoints/<step>/manifest.json                see `manifest.py`; written after the commit
    checkpoints/<step>.damaged/                     set aside by a restore
    checkpoints/<step>.unverified/                  the same, where there was a verified one

Orbax renames a checkpoint into place once it is whole, but does not notice a bit that flips later. A
checkpoint without a manifest is one whose process was killed between commit and manifest: it is unverified,
and used only where no other can be.
"""

import itertools
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
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
from hyena_jax.training.declared import misfit
from hyena_jax.training.manifest import damage_in, is_verified, write_manifest

Tree = Any

STEP = re.compile("0|[1-9][0-9]*")
"""Names of committed checkpoints."""
TEMPORARY = ".orbax-checkpoint-tmp"
"""In the names of what Orbax has not committed."""


class Restored(NamedTuple):
    """Items of one checkpoint."""

    step: int
    items: dict[str, Tree]
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, for writing; several processes all make the same calls.

    Use as a context manager: leaving it waits for the save under way. `keep` latest checkpoints are kept,
    and beside them the one whose meta has the lowest `loss`.
    """

    def __init__(self, folder: Path, keep: int, report: Callable[[str], None]):
        self._folder = folder.resolve()  # it may be a link to a larger disk
        self._keep = keep
        self._report = report
        self._manager: ocp.CheckpointManager | None = None
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        self._usual_hook = threading.excepthook
        threading.excepthook = self._on_thread_error
        self._quiet = _without_abandoned()
        self._quiet.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if lost_another(error):  # a save under way waits for it: it cannot end
            self._committer.shutdown(wait=False)
            return
        try:
            self._finish()
        finally:
            self._committer.shutdown()
            try:
                self._close()
            finally:
                threading.excepthook = self._usual_hook
                self._quiet.__exit__(kind, error, trace)

    def _close(self) -> None:
        if self._manager is not None:
            with _as_os_error("the last checkpoint could not be written"):
                self._manager.close()

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Orbax's thread would print a traceback of what is raised again where we wait for it."""
        if error.thread is None or error.thread.name != "save_finalize":
            self._usual_hook(error)

    def restore(self, targets: dict[str, Tree]) -> Restored | None:
        """The newest checkpoint that is verified and whole, or None if there is none at all.

        `targets` are trees of arrays, or of `jax.ShapeDtypeStruct`: those with a sharding are restored with
        it, whatever the layout was when they were saved; each process reads only what its devices hold.

        Where none is verified, the newest that can be read is used, and reported. Those that are newer than
        the one that is used are renamed `<step>.damaged` or `<step>.unverified` and reported: left in place
        they would make Orbax skip the later save of the same step. So are links, which Orbax cannot delete.

        Raises:
          UserError: if there were checkpoints and none can be used; they stay where they are, so that the
            next start is refused too. If one is whole but not of this model.
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
                return restored
            faults[step] = restored
        if steps:
            newest = max(faults)
            raise UserError(
                f"every checkpoint in {self._folder} is damaged ({newest}: {faults[newest]}); start again in"
                " a new folder"
            )
        return None

    def save(self, step: int, items: dict[str, Tree], meta: dict[str, Any]) -> None:
        """Saves trees in the background; a save under way is finished first.

        Leaves are NumPy arrays, or arrays over all devices of all processes, which then write them together.
        They are copied from the devices before this returns.

        `meta` is JSON; its `step` is this step, by which a folder that was renamed is noticed, and its
        `loss` the validation loss at this step, None where it was not evaluated.
        """
        self._finish()
        arguments = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        arguments["meta"] = ocp.args.JsonSave(meta)
        with _as_os_error(f"checkpoint {step} could not be written"):
            manager = self._open()
            if not manager.save(step, args=ocp.args.Composite(**arguments), force=True):
                raise OSError(f"Orbax refused to save in {self._folder}")
        self._pending = self._committer.submit(self._commit, manager, step)

    def _commit(self, manager: ocp.CheckpointManager, step: int) -> None:
        with _as_os_error(f"checkpoint {step} could not be written"):
            manager.wait_until_finished()
            if is_first():
                write_manifest(self._folder / str(step))

    def _finish(self) -> None:
        """Waits for the save under way; raises here what went wrong there."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=_LatestAndBest(self._folder, self._keep),
                cleanup_tmp_directories=True,
            )
            self._manager = ocp.CheckpointManager(self._folder.absolute(), options=options)
        return self._manager


@contextmanager
def _as_os_error(what: str) -> Iterator[None]:
    """Storage layers raise many kinds when a disk is full or not writable; callers should see one."""
    try:
        yield
    except Exception as error:
        reason = str(error).partition(" [")[0]  # without TensorStore's specification of the array
        raise OSError(f"{what}: {reason}") from error


@contextmanager
def _without_abandoned() -> Iterator[None]:
    """After a failure, does not print what becomes of the reads and writes that were still under way.

    TensorStore reports them to an event loop that is closed, and Orbax's coroutines are dropped. Since that
    may come late, it holds for the rest of the process.
    """
    usual = sys.unraisablehook

    def report(error: Any) -> None:
        code = getattr(error.object, "cr_code", None)
        is_dropped = code is not None and "orbax" in code.co_filename
        if not is_dropped and str(error.exc_value) != "Event loop is closed":
            usual(error)

    sys.unraisablehook = report
    yield
    sys.unraisablehook = usual


class _LatestAndBest:
    """Orbax's preservation policy. Its own BestN forgets the losses of earlier processes."""

    def __init__(self, folder: Path, keep: int):
        self._folder = folder
        self._keep = keep

    def should_preserve(
        self, checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo], *, context: object
    ) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*sorted(steps)[-self._keep :], best(self._folder).step}
        return [step in kept for step in steps]


def restore_readonly(
    folder: Path, targets: dict[str, Tree], report: Callable[[str], None], step: int | None = None
) -> Restored:
    """The checkpoint of `step`, or the one that `Checkpoints.restore` takes; changes nothing on disk.

    Raises:
      UserError: if there is none, or the one asked for is missing or damaged.
    """
    steps = from_first(lambda: _by_trust(folder))
    if step is not None:
        steps = [(saved, verified) for saved, verified in steps if saved == step]
        if not steps:
            raise UserError(f"step must be one of the saved {saved_steps(folder)}, got {step}")
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
    raise UserError(f"{folder} holds no usable checkpoint")


class Best(NamedTuple):
    """The saved step with the lowest validation loss; (None, inf) where no saved step was evaluated."""

    step: int | None
    loss: float


def best(folder: Path) -> Best:
    """Finds it among the committed checkpoints."""
    metas = [(step, _meta(folder / str(step))) for step in saved_steps(folder)]
    known = [
        Best(step, meta["loss"])
        for step, meta in metas
        if meta.get("step") == step and isinstance(meta.get("loss"), float) and math.isfinite(meta["loss"])
    ]
    return min(known, key=lambda found: found.loss, default=Best(None, math.inf))


def saved_steps(folder: Path) -> list[int]:
    """Committed steps, newest first."""
    if not folder.is_dir():
        return []
    steps = (int(path.name) for path in folder.iterdir() if STEP.fullmatch(path.name))
    return sorted(steps, reverse=True)


_UNVERIFIED = "the run was stopped before its digests were written"


def _by_trust(folder: Path) -> list[tuple[int, bool]]:
    """Saved steps, and whether each has a manifest: those that have one first, newest first."""
    steps = [(step, is_verified(folder / str(step))) for step in saved_steps(folder)]
    return sorted(steps, key=lambda found: found[1], reverse=True)


def _try_restore(folder: Path, step: int, verified: bool, targets: dict[str, Tree]) -> Restored | str:
    """The items of a checkpoint, or why it cannot be used.

    Raises:
      UserError: if the files are what was saved, but do not fit: it is the model that changed.
    """
    checkpoint = folder / str(step)
    fault = from_first(lambda: _fault(checkpoint))
    if fault is not None:
        return fault
    unfit = from_first(lambda: misfit(checkpoint, targets))
    if unfit is None:
        arguments = {name: ocp.args.StandardRestore(target) for name, target in targets.items()}
        try:
            with _without_abandoned(), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                restored = checkpointer.restore(
                    checkpoint.absolute(), args=ocp.args.Composite(**arguments, meta=ocp.args.JsonRestore())
                )
            items = {name: restored[name] for name in targets}
            if list(map(np.shape, jax.tree.leaves(items))) == list(map(np.shape, jax.tree.leaves(targets))):
                return Restored(step, items, restored["meta"])
            unfit = "its arrays are arranged in another way"
        except Exception as error:  # Orbax and its storage layer raise many kinds for files they cannot use
            unfit = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    if verified:
        raise UserError(f"{checkpoint} is whole, but does not fit this model: {unfit}")
    return unfit


def _fault(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used, as far as its files tell; None if nothing speaks against it."""
    if checkpoint.is_symlink():
        return "it is a symbolic link"
    if not checkpoint.is_dir():
        return "it is not a folder"
    found = damage_in(checkpoint)
    if found is None and _meta(checkpoint).get("step") != int(checkpoint.name):
        return f"it is a checkpoint of step {_meta(checkpoint).get('step')!r}"
    return found


def _set_aside(folder: Path, step: int, faults: dict[int, str]) -> list[str]:
    """Renames the checkpoints that are newer than `step`, and links; returns a line for each."""
    lines = []
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and TEMPORARY in path.name:
            path.unlink()  # Orbax deletes what has such a name, which fails for links
        elif STEP.fullmatch(path.name) and (int(path.name) > step or path.is_symlink()):
            why = faults.get(int(path.name), "it is a symbolic link" if path.is_symlink() else None)
            kind = "unverified" if why is None else "damaged"
            names = (f"{path.name}.{kind}" + (f".{i}" if i else "") for i in itertools.count())
            free = next(name for name in names if not os.path.lexists(folder / name))
            path.rename(folder / free)
            lines.append(f"checkpoint {path.name} is {kind}: set aside as {free} ({why or _UNVERIFIED})")
    return lines


def _meta(checkpoint: Path) -> dict[str, Any]:
    try:
        meta = read_json("metadata", checkpoint / "meta" / "metadata")
        return meta if isinstance(meta, dict) else {}
    except UserError:
        return {}
