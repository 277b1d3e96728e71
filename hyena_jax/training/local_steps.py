"""Checkpoints in a folder of this machine: which there are, whether they are whole, and setting them aside.

    checkpoints/<step>/manifest.json                SHA-256 digests, written after the commit
    checkpoints/<step>.damaged/                     set aside by a restore
    checkpoints/<step>.unverified/                  the same, if an earlier verified one was used instead

A checkpoint without a manifest is unverified: its process was killed between commit and manifest. It is used
only if no other checkpoint can be.
"""

import itertools
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hyena_jax.system.errors import UserError
from hyena_jax.system.files import STEP_FOLDER, read_json
from hyena_jax.training.checkpoint_files import damage_in, is_verified, write_manifest

TEMPORARY = ".orbax-checkpoint-tmp"
"""Part of the names of folders that Orbax has not committed."""
UNVERIFIED = "the run was stopped before its digests were written"


class LocalSteps:
    """The committed checkpoints in a folder."""

    deletes = False
    """Whether `delete` removes those that are kept no longer; Orbax does it here."""

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
        try:
            meta = read_json("metadata", self._folder / str(step) / "meta" / "metadata")
            return meta if isinstance(meta, dict) else {}
        except UserError:
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

    def uncommit(self, step: int) -> None:
        """Called before Orbax deletes a checkpoint to replace it."""

    def delete(self, steps: Collection[int]) -> None:
        """Deletes checkpoints."""
        raise NotImplementedError("Orbax deletes in a folder of this machine")

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
