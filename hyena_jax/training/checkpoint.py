"""Checkpoints: written by Orbax, verified by a manifest. Knows pytrees, not models.

    checkpoints/<step>/{params,train_state,meta}/   one committed checkpoint
    checkpoints/<step>/manifest.json                written last; says what the others must be

Orbax commits a checkpoint once it is whole, but does not notice a bit that flips later. Where they lie, and
what a kill or damage leaves there, is known to `checkpoint_files.py` and `bucket_steps.py`.
"""

import math
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from hyena_jax.parallel.processes import from_first, is_first, lost_another, on_first
from hyena_jax.system.errors import UserError
from hyena_jax.system.storage.bucket import Bucket
from hyena_jax.system.storage.bucket_steps import BucketSteps
from hyena_jax.system.storage.lease import SHORT_PATIENCE, Lease
from hyena_jax.system.storage.location import location_of
from hyena_jax.training.checkpoint_files import (
    UNVERIFIED,
    Blocks,
    LocalSteps,
    as_os_error,
    misfit,
    replace_arrays,
    write_manifest,
)

Tree = Any
Steps = LocalSteps | BucketSteps


class Meta(NamedTuple):
    """What a checkpoint says of itself besides its arrays."""

    step: int
    """The step of its folder, so that a renamed folder is noticed."""
    loss: float | None = None
    """The validation loss, or None if it was not evaluated there."""
    measured_on: str | None = None
    """The held-out rows of that loss: see `evaluate.measured_on`."""
    reached: str | None = None
    """The target that the run had reached there, if any."""
    unevaluated: bool = False
    """Whether its evaluation was cut short, so that a resumed run makes it first."""
    timed: bool = False
    """Whether only the clock asked for it, so that a later one replaces it."""
    base: str | None = None
    """With LoRA, the digest of the parameters that are adapted."""
    data_state: Any = None
    """JSON values: the state of the iterator of the data, if they can only be read once."""

    def to_json(self) -> dict[str, Any]:
        """Its fields, without those that say nothing."""
        fields = self._asdict().items()
        given = {name: value for name, value in fields if value is not None and value is not False}
        return {"step": self.step, "loss": self.loss, **given}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Meta":
        """The inverse of `to_json`; the fields of later versions are left out, and values are not checked."""
        known = {name: values[name] for name in cls._fields if name in values}
        return cls(**{"step": None, **known})


class Restored(NamedTuple):
    """Items of one checkpoint."""

    step: int
    items: dict[str, Tree]
    meta: Meta


class Checkpoints:
    """The checkpoints of one run, for writing; all processes make the same calls.

    A context manager; leaving it waits for the pending save. Keeps the latest `keep` checkpoints, the newest
    verified one before them, and the one with the lowest `loss`. Timed ones do not count: each is kept until
    a later one is verified.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        report: Callable[[str], None],
        lease: Lease | None = None,
    ):
        """`report` gets a line about each checkpoint that cannot be used; `lease`, the lock of a folder in a
        bucket, is checked before each commit."""
        self._lease = lease
        self._steps = steps_in(folder.resolve(), lease)  # it may be a link to a larger disk
        self._keep = keep
        self._report = report
        self._manager: ocp.CheckpointManager | None = None
        self._is_timed = False  # the checkpoint that is being saved
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        self._quiet = _quiet()
        self._quiet.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        is_stuck = lost_another(error)  # a pending save waits for that process and cannot end
        try:
            if not is_stuck:
                self._finish(SHORT_PATIENCE if isinstance(error, OSError) else None)
        finally:
            is_stuck |= self._pending is not None
            self._committer.shutdown(wait=not is_stuck)
            try:
                if self._manager is not None and not is_stuck:
                    with self._writing("the last checkpoint"):
                        self._manager.close()
            finally:
                if not is_stuck:
                    self._quiet.__exit__(kind, error, trace)

    def restore(self, targets: dict[str, Tree]) -> Restored | None:
        """The newest checkpoint that is verified and whole, or None if there are no checkpoints.

        `targets` are trees of arrays or of `jax.ShapeDtypeStruct`; a leaf with a sharding is restored with
        it, however it was sharded when saved, and each process reads only what its devices hold.

        If none is verified, the newest readable one is used and reported. Newer ones are set aside and
        reported: Orbax would skip the later save of the same step. If none can be used, or a whole one does
        not fit the model, UserError is raised and all stay where they are, so that the next start is refused
        too.
        """
        on_first(self._steps.begin)
        steps = from_first(lambda: _by_trust(self._steps))
        faults: dict[int, str] = {}
        for step, verified in steps:
            restored = _try_restore(self._steps, step, verified, targets)
            if isinstance(restored, Restored):
                if not verified:
                    self._report(f"checkpoint {step} is unverified ({UNVERIFIED}) and used: no other can be")
                for line in from_first(lambda step=step: self._steps.set_aside(step, faults)):
                    self._report(line)
                for line in from_first(lambda step=step: _set_aside_best(self._steps, step)):
                    self._report(line)
                return restored
            faults[step] = restored
        if steps:
            newest = max(faults)
            raise UserError(
                f"every checkpoint in {self._steps} is damaged ({newest}: {faults[newest]}); start over in"
                " a new folder"
            )
        return None

    def save(self, meta: Meta, items: dict[str, Tree]) -> None:
        """Saves trees in the background, after any pending save is finished.

        Leaves are NumPy arrays, or arrays over the devices of all processes, which then write them together;
        they are copied before this returns.
        """
        self._finish()
        step, self._is_timed = meta.step, meta.timed
        arguments = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        arguments["meta"] = ocp.args.JsonSave(meta.to_json())
        with self._writing(f"checkpoint {step}"):
            if self._manager is None:
                on_first(self._steps.begin)  # a paused writer may have woken up since `restore`
                options = ocp.CheckpointManagerOptions(
                    preservation_policy=_LatestAndBest(list if self._steps.deletes else self._kept),
                    cleanup_tmp_directories=True,
                )
                self._manager = ocp.CheckpointManager(self._steps.path(), options=options)
            if not self._manager.save(step, args=ocp.args.Composite(**arguments), force=True):
                raise OSError(f"Orbax refused to save in {self._steps}")
        self._pending = self._committer.submit(self._commit, self._manager, step)

    def revise(self, meta: Meta) -> None:
        """Replaces what a saved checkpoint says of itself; its arrays stay as they are."""
        self._finish()
        with self._writing(f"what is known of checkpoint {meta.step}"):
            on_first(lambda: self._steps.revise(meta.step, meta.to_json()))

    def best_loss(self, measured_on: str) -> float:
        """The lowest validation loss of the saved steps on these held-out rows; infinity if there is none."""
        found = Best(*from_first(lambda: _best(self._steps)))
        return found.loss if found.measured_on == measured_on else math.inf

    def raise_if_failed(self) -> None:
        """Raises the error of the pending save, if it has failed by now, or Lost, if that is known."""
        if self._lease is not None:
            self._lease.raise_if_lost()
        if self._pending is not None and self._pending.done():
            self._finish()

    def _commit(self, manager: ocp.CheckpointManager, step: int) -> None:
        with self._writing(f"checkpoint {step}"):
            manager.wait_until_finished()
            if is_first():
                self._steps.commit(step)
                if self._steps.deletes:
                    saved = self._steps.saved()
                    self._steps.delete(set(saved) - self._kept(saved))

    def _kept(self, found: Sequence[int]) -> set[int | None]:
        """The steps that stay. The newest verified one does: the one being saved has no manifest yet."""
        steps, newest = self._steps, max(found, default=None)  # whose meta cannot be read yet
        verified = (step for step in found if steps.is_verified(step))
        timed = {step: steps.meta(step).get("timed") for step in found} | {newest: self._is_timed}
        lasting = [step for step in sorted(found) if not timed[step]]
        return {newest, *lasting[-self._keep :], max(verified, default=None), _best(steps).step}

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Raises any error as an OSError; as Lost, if another process deleted what was being written."""
        with as_os_error(f"{what} could not be written"):
            try:
                yield
            except Exception:
                if self._lease is not None:
                    self._lease.check(SHORT_PATIENCE)
                raise

    def _finish(self, patience: float | None = None) -> None:
        """Waits for the pending save, and raises its error.

        A bucket that is silent for `patience` seconds, or the usual ones, is an error too. The save is then
        left pending: the libraries that write it give up much later.
        """
        if self._pending is not None:
            while self._lease is not None and not wait([self._pending], SHORT_PATIENCE).done:
                self._lease.check(patience)
            pending, self._pending = self._pending, None
            pending.result()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences Orbax's thread, whose error is raised where we wait for it, and what a failure interrupts.

    TensorStore then reports to a closed event loop, and Orbax's coroutines are dropped. Reports may come
    late, so after a failure they stay silenced for the rest of the process.
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
    """Orbax's preservation policy; its own BestN forgets the losses of earlier processes."""

    def __init__(self, kept: Callable[[Sequence[int]], Collection[int | None]]):
        self._kept = kept

    def should_preserve(
        self, checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo], *, context: object
    ) -> list[bool]:
        found = [checkpoint.step for checkpoint in checkpoints]
        kept = self._kept(found)
        return [step in kept for step in found]


def restore_readonly(
    folder: Path, targets: dict[str, Tree], report: Callable[[str], None], step: int | None = None
) -> Restored:
    """The checkpoint of `step`, or the one that `Checkpoints.restore` would use; changes nothing on disk."""
    place = steps_in(folder)
    steps = from_first(lambda: _by_trust(place))
    if step is not None:
        steps = [(saved, verified) for saved, verified in steps if saved == step]
        if not steps:
            raise UserError(f"must be one of the saved {place.saved()}, got {step}", "step")
    for candidate, verified in steps:
        restored = _try_restore(place, candidate, verified, targets)
        if isinstance(restored, Restored):
            if not verified:
                report(f"checkpoint {candidate} is unverified ({UNVERIFIED})")
            for newer, is_other_verified in steps:
                if newer > candidate and verified and not is_other_verified:
                    report(f"checkpoint {newer} is unverified ({UNVERIFIED}) and not used")
            return restored
        report(f"checkpoint {candidate} is damaged ({restored})")
    if step is not None:
        raise UserError(f"must be one of the undamaged of {place.saved()}, got {step}: {restored}", "step")
    raise UserError(f"{place} holds no usable checkpoint")


class Best(NamedTuple):
    """The saved step with the lowest validation loss; (None, inf) if no saved step was evaluated."""

    step: int | None
    loss: float
    measured_on: str | None = None
    """The held-out rows of this loss."""


def best(folder: Path) -> Best:
    """The best of the committed checkpoints whose loss was measured on the same rows as the newest loss."""
    return _best(steps_in(folder))


def saved_steps(folder: Path) -> list[int]:
    """Committed steps, newest first."""
    return steps_in(folder).saved()


def steps_in(folder: Path, lease: Lease | None = None) -> Steps:
    """The checkpoints in a folder, or in the bucket whose local copy it belongs to."""
    location = location_of(folder)
    return LocalSteps(folder) if location is None else BucketSteps(Bucket(location), lease)


def _best(steps: Steps) -> Best:
    metas = [(step, Meta.from_json(steps.meta(step))) for step in steps.saved()]
    known = [
        Best(step, meta.loss, meta.measured_on)
        for step, meta in metas
        if meta.step == step and isinstance(meta.loss, float) and math.isfinite(meta.loss)
    ]
    comparable = [found for found in known if found.measured_on == known[0].measured_on]
    return min(comparable, key=lambda found: found.loss, default=Best(None, math.inf))


def _by_trust(steps: Steps) -> list[tuple[int, bool]]:
    """(step, whether it is verified) of saved steps: verified ones first, newest first."""
    found = [(step, steps.is_verified(step)) for step in steps.saved()]
    return sorted(found, key=lambda one: one[1], reverse=True)


def _try_restore(steps: Steps, step: int, verified: bool, targets: dict[str, Tree]) -> Restored | str:
    """The items of a checkpoint, or why it cannot be used; UserError if it is whole but does not fit."""
    fault = from_first(lambda: steps.fault(step))
    if fault is not None:
        return fault
    unfit = from_first(lambda: misfit(partial(steps.store, step), targets))
    if unfit is None:
        arguments = {name: ocp.args.StandardRestore(target) for name, target in targets.items()}
        try:
            with _quiet(), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                restored = checkpointer.restore(steps.path(step), args=ocp.args.Composite(**arguments))
            items = {name: restored[name] for name in targets}
            if list(map(np.shape, jax.tree.leaves(items))) == list(map(np.shape, jax.tree.leaves(targets))):
                return Restored(step, items, Meta.from_json(steps.meta(step)))
            unfit = "the tree of its arrays differs"
        except Exception as error:  # Orbax and its storage layer raise many kinds for unusable files
            unfit = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            is_of_machine = isinstance(error, OSError | MemoryError) or "RESOURCE_EXHAUSTED" in unfit
            if is_of_machine and steps.fault(step) is None:
                raise OSError(f"{steps.path(step)} could not be read: {unfit}") from error
    fault = steps.fault(step)  # once more: a run that goes on may have deleted it meanwhile
    if fault is not None:
        return fault
    if verified:
        raise UserError(f"{steps.path(step)} is whole, but does not fit this model: {unfit}")
    return unfit


def _set_aside_best(steps: Steps, step: int) -> list[str]:
    """Sets aside damaged best checkpoints, until the best is `step` or whole; a line about each."""
    lines = []
    while (found := _best(steps).step) not in (None, step):
        fault = steps.fault(found)
        if fault is None:
            break
        lines.append(steps.drop(found, fault))
    return lines


class Streamed(NamedTuple):
    """An item of a checkpoint: a tree of shapes, its placeholders, and the blocks of each array."""

    shapes: Tree
    """Arrays or `jax.ShapeDtypeStruct`."""
    placeholders: Tree
    """A NumPy array for each shape, of its rank and dtype, of one number."""
    blocks: Mapping[str, Blocks]
    """By path, such as `blocks_0/mixer/in_proj/kernel`; an array that is not named keeps its placeholder."""


def save_streamed(folder: Path, items: Mapping[str, Streamed]) -> None:
    """Writes the checkpoint of step 0, with its manifest, array by array, in a folder without checkpoints.

    For parameters that do not fit into memory together: Orbax writes placeholders, and each array is then
    replaced, in blocks of rows, by one of its full shape. If that fails, the incomplete checkpoint must be
    removed by the caller.
    """
    placeholders = {name: item.placeholders for name, item in items.items()}
    with Checkpoints(folder, 1, print) as checkpoints:
        checkpoints.save(Meta(0), placeholders)
    for name, item in items.items():
        replace_arrays(folder / "0" / name, item.shapes, item.blocks)
    for path in (folder / "0").rglob("*"):  # until the files are on the disk
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    write_manifest(folder / "0")
