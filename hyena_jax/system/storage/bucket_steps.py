"""Checkpoints in a bucket: which there are, whether they are whole, and deleting them.

    checkpoints/<step>/manifest.json    name, size, CRC-32C and generation of every object, put last

The manifest is the commit: a step without one was never finished, and is deleted by the next start, which
holds the folder's lock. Objects never change, so one list shows whether they are those that were saved, and
nothing is read back. A step is deleted manifest first: a kill leaves an unfinished step, not a damaged one.
"""

import json
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from hyena_jax.system.errors import UserError
from hyena_jax.system.files import MANIFEST, STEP_FOLDER, parse_json
from hyena_jax.system.storage.bucket import ABSENT, Bucket, Found, Refused
from hyena_jax.system.storage.lease import Lease, Lost


class BucketSteps:
    """The committed checkpoints below a name in a bucket; the methods are those of `LocalSteps`."""

    deletes = True

    def __init__(self, bucket: Bucket, lease: Lease | None = None):
        """Whoever commits or deletes must hold `lease`, the lock of the run's folder."""
        self._bucket, self._lease = bucket, lease
        # By step and generation of its manifest, which never changes.
        self._read = lru_cache(maxsize=64)(lambda step, generation: bucket.get(f"{step}/{MANIFEST}"))

    def __str__(self) -> str:
        return str(self._bucket.location)

    def path(self, step: int | None = None) -> str:
        return str(self._bucket.location if step is None else self._bucket.location / str(step))

    def store(self, step: int, item: str) -> dict[str, Any]:
        location = self._bucket.location / f"{step}/{item}"
        return {"driver": "gcs", "bucket": location.bucket, "path": f"{location.name}/"}

    def saved(self) -> list[int]:
        found = self._bucket.below()
        return sorted((_step(one) for one in found if one.name == f"{_step(one)}/{MANIFEST}"), reverse=True)

    def is_verified(self, step: int) -> bool:
        return True

    def meta(self, step: int) -> dict[str, Any]:
        return self._manifest(step).get("meta", {})

    def fault(self, step: int) -> str | None:
        there, manifest = self._objects(step), self._manifest(step)
        for name, identity in manifest.get("objects", {}).items():
            if name not in there:
                return f"{name} is missing"
            if there[name] != identity:
                return f"{name} is not what was saved"
        if "objects" not in manifest:
            return f"{MANIFEST} cannot be read, or is of a run on a disk, which goes on there, not in a copy"
        if self.meta(step).get("step") != step:
            return f"it is a checkpoint of step {self.meta(step).get('step')!r}"
        return None

    def begin(self) -> None:
        """Deletes what starts that were killed left of unfinished steps."""
        committed = {None, *self.saved()}  # None: what a user put there
        rest = [found.name for found in self._bucket.below() if _step(found) not in committed]
        if rest:
            self._lease.check()
            self._bucket.delete(rest)

    def commit(self, step: int) -> None:
        self._lease.check()
        objects = self._objects(step)
        meta = parse_json(self._bucket.get(f"{step}/meta/metadata") or b"{}")
        self._put(step, {"meta": meta, "objects": objects}, ABSENT)

    def _put(self, step: int, manifest: Mapping[str, Any], generation: int) -> None:
        try:
            self._bucket.put(f"{step}/{MANIFEST}", json.dumps(manifest, indent=1).encode(), generation)
        except Refused as error:
            raise Lost(f"{self.path(step)} was saved by another process") from error

    def revise(self, step: int, meta: Mapping[str, Any]) -> None:
        self._lease.check()
        found = self._bucket.stat(f"{step}/{MANIFEST}")
        self._put(step, {**self._manifest(step), "meta": meta}, found.generation)

    def delete(self, steps: Collection[int]) -> None:
        for step in steps:
            self._lease.check()
            self._bucket.delete([f"{step}/{MANIFEST}"])
            self._bucket.delete(found.name for found in self._bucket.below(f"{step}/"))

    def set_aside(self, step: int, faults: Mapping[int, str]) -> list[str]:
        """Deletes checkpoints newer than `step`, whose names are needed again; returns a line about each."""
        return [self.drop(newer, faults[newer]) for newer in self.saved() if newer > step]

    def drop(self, step: int, why: str | None) -> str:
        """Deletes a checkpoint; a line about it."""
        self.delete([step])
        return f"checkpoint {step} is damaged: deleted ({why})"

    def _objects(self, step: int) -> dict[str, list[int | str]]:
        """Size, CRC-32C and generation of a step's objects, by name."""
        found = self._bucket.below(f"{step}/")
        return {one.name.partition("/")[2]: [one.size, one.crc32c, one.generation] for one in found}

    def _manifest(self, step: int) -> dict[str, Any]:
        """The manifest of a step; empty if it cannot be read."""
        found = self._bucket.stat(f"{step}/{MANIFEST}")
        try:
            manifest = parse_json(self._read(step, found.generation) or b"") if found else {}
            return manifest if isinstance(manifest, dict) else {}
        except UserError:
            return {}


def _step(found: Found) -> int | None:
    """The step that an object belongs to; None if its name is not of a checkpoint."""
    name = found.name.partition("/")[0]
    return int(name) if STEP_FOLDER.fullmatch(name) else None
