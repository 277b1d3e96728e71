"""Checkpoints: Orbax writes them, a SHA-256 manifest proves them. Knows pytrees, not models.

    checkpoints/<step>/{params,train_state,meta}/   one committed checkpoint
    checkpoints/<step>/manifest.json                see `manifest.py`; written after the commit
    checkpoints/<step>.damaged/                     set aside by a restore

Orbax renames a checkpoint into place once it is whole, but does not notice a bit that flips later. A
checkpoint without a manifest is one whose process was killed between commit and manifest: it is used, and
reported as unverified.
"""

import math
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from hyena_jax.config import UserError, read_json
from hyena_jax.training.distributed import from_first, is_first, lost_another
from hyena_jax.training.manifest import MANIFEST, is_damaged, write_manifest

Tree = Any


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
        self._folder = folder
        self._keep = keep
        self._report = report
        self._manager: ocp.CheckpointManager | None = None
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        self._usual_hooks = threading.excepthook, sys.unraisablehook
        threading.excepthook, sys.unraisablehook = self._on_thread_error, self._on_unraisable
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
                threading.excepthook, sys.unraisablehook = self._usual_hooks

    def _close(self) -> None:
        if self._manager is not None:
            with _as_os_error("the last checkpoint could not be written"):
                self._manager.close()

    def _on_thread_error(self, error: threading.ExceptHookArgs) -> None:
        """Orbax's thread would print a traceback of what is raised again where we wait for it."""
        if error.thread is None or error.thread.name != "save_finalize":
            self._usual_hooks[0](error)

    def _on_unraisable(self, error: Any) -> None:
        """TensorStore reports the writes under way to an event loop that the first failure closed."""
        if str(error.exc_value) != "Event loop is closed":
            self._usual_hooks[1](error)

    def restore(self, targets: dict[str, Tree]) -> Restored | None:
        """The newest checkpoint that is whole, or None if there is none at all.

        `targets` are trees of arrays, or of `jax.ShapeDtypeStruct`: those with a sharding are restored with
        it, whatever the layout was when they were saved; each process reads only what its devices hold.

        Damaged ones that are newer are renamed `<step>.damaged` and reported: left in place they would make
        Orbax skip the later save of the same step.

        Raises:
          UserError: if there were checkpoints and all are damaged; they stay where they are, so that the
            next start is refused too.
        """
        steps = from_first(lambda: saved_steps(self._folder))
        for i, step in enumerate(steps):
            restored = _try_restore(self._folder, step, targets, self._report)
            if restored is not None:
                for damaged in steps[:i]:
                    aside = from_first(lambda step=damaged: _set_aside(self._folder / str(step)).name)
                    self._report(f"checkpoint {damaged} is damaged: set aside as {aside}")
                return restored
        if steps:
            raise UserError(f"every checkpoint in {self._folder} is damaged; start again in a new folder")
        return None

    def save(self, step: int, items: dict[str, Tree], meta: dict[str, Any]) -> None:
        """Saves trees in the background; a save under way is finished first.

        Leaves are NumPy arrays, or arrays over all devices of all processes, which then write them together.
        They are copied from the devices before this returns.

        `meta` is JSON; its `loss` is the validation loss at this step, None where it was not evaluated.
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
    """The checkpoint of `step`, or the newest that is whole; changes nothing on disk.

    Raises:
      UserError: if there is none, or the one asked for is missing or damaged.
    """
    steps = from_first(lambda: saved_steps(folder))
    if step is not None:
        if step not in steps:
            raise UserError(f"step must be one of the saved {steps}, got {step}")
        steps = [step]
    for candidate in steps:
        restored = _try_restore(folder, candidate, targets, report)
        if restored is not None:
            return restored
        report(f"checkpoint {candidate} is damaged")
    raise UserError(f"{folder} holds no usable checkpoint")


class Best(NamedTuple):
    """The saved step with the lowest validation loss; (None, inf) where no saved step was evaluated."""

    step: int | None
    loss: float


def best(folder: Path) -> Best:
    """Finds it among the committed checkpoints."""
    losses = [
        (step, _read_json(folder / str(step) / "meta" / "metadata").get("loss"))
        for step in saved_steps(folder)
    ]
    known = [Best(step, loss) for step, loss in losses if isinstance(loss, float) and math.isfinite(loss)]
    return min(known, key=lambda found: found.loss, default=Best(None, math.inf))


def saved_steps(folder: Path) -> list[int]:
    """Committed steps, newest first."""
    if not folder.is_dir():
        return []
    steps = (int(path.name) for path in folder.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name))
    return sorted(steps, reverse=True)


def _try_restore(
    folder: Path, step: int, targets: dict[str, Tree], report: Callable[[str], None]
) -> Restored | None:
    checkpoint = folder / str(step)
    if from_first(lambda: is_damaged(checkpoint)):
        return None
    proven = (checkpoint / MANIFEST).exists()
    if not proven:
        report(f"checkpoint {step} is unverified: the run was stopped before its digests were written")
    arguments = {name: ocp.args.StandardRestore(target) for name, target in targets.items()}
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(
                checkpoint.absolute(), args=ocp.args.Composite(**arguments, meta=ocp.args.JsonRestore())
            )
    except Exception as error:  # Orbax and its storage layer raise many kinds for files they cannot use
        if proven:  # the files are what was saved, so it is the model that changed: keep them
            raise UserError(f"{checkpoint} is whole, but does not fit this model: {error}") from error
        return None
    items = {name: restored[name] for name in targets}
    for (path, wanted), found in zip(
        jax.tree_util.tree_leaves_with_path(targets), jax.tree.leaves(items), strict=True
    ):
        if wanted.shape != found.shape:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise UserError(
                f"{checkpoint} does not fit this model: {name} is {found.shape}, not {wanted.shape}"
            )
    return Restored(step, items, restored["meta"])


def _set_aside(checkpoint: Path) -> Path:
    aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
    if aside.exists():
        shutil.rmtree(aside)
    return checkpoint.rename(aside)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        meta = read_json("metadata", path)
        return meta if isinstance(meta, dict) else {}
    except UserError:
        return {}
