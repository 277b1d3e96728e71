"""A run folder in a bucket: the run works in a local copy of its small files, which a mirror puts back.

| local copy        | in the bucket                                   | a kill leaves              |
|-------------------|-------------------------------------------------|----------------------------|
| metrics.jsonl     | metrics/00000.jsonl, ...: sealed parts, a tail  | the rows until the last put|
| tensorboard/FILE  | tensorboard/FILE.00000, ...: the same           | the same                   |
| other files, wandb| put whole where they differ, config.json last   | the old one or the new one |
| no copy           | checkpoints/, see `bucket_steps.py`             |                            |
| no copy           | lock.json, clock.json, see `storage/lease.py`   |                            |
"""

import itertools
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

from hyena_jax.system.errors import require
from hyena_jax.system.files import EVENTS, METRICS, RUN_CONFIG, SWEEP
from hyena_jax.system.storage.bucket import ABSENT, Bucket, Refused, checksum
from hyena_jax.system.storage.lease import CLOCK_OBJECT, LOCK_OBJECT, SHORT_PATIENCE, Lease, repeat
from hyena_jax.system.storage.location import Location, is_url, location_of, new_copy

METRICS_PARTS = "metrics/"
"""Where the parts of METRICS lie."""
EVERY = 30.0
"""Seconds between two puts, besides those before each checkpoint."""
SEALED = 2**20
"""Bytes from which on a part of a growing file is left as it is, and the next one begins."""


def opened(where: str | Path | Location, argument: str = "workdir") -> Path:
    """The folder itself, or a local copy of the small files of one in a bucket.

    Raises UserError for a wrong URL, or one that was made a `Path`, a missing bucket or package; OSError if
    the bucket cannot be read.
    """
    if is_url(where):
        location = where if isinstance(where, Location) else Location.parse(str(where), argument)
        path = new_copy(location)
        download(Bucket(location, argument), path)
        return path
    path = Path(where)
    first, *_ = path.parts or (".",)
    is_local = not (len(first) > 2 and first.endswith(":"))  # as pathlib begins gs://bucket/run
    require(is_local or path.exists(), argument, str(where), "a folder on this machine")
    return path


def renew(path: Path) -> None:
    """Makes a local copy once more, of what the bucket holds now; does nothing with any other folder."""
    location = location_of(path)
    if location is not None:
        shutil.rmtree(path, ignore_errors=True)
        download(Bucket(location), path)


def share(path: Path) -> None:
    """Puts a file of a local copy into its bucket; does nothing with any other file."""
    location = location_of(path)
    if location is not None:
        Bucket(location_of(path.parent)).put_file(path.name, path)


def fetch(path: Path) -> None:
    """The inverse of `share`: gets a file of a local copy, if the bucket has it."""
    if location_of(path) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Bucket(location_of(path.parent)).get_file(path.name, path)


def download(bucket: Bucket, path: Path) -> None:
    """Copies the small files of a run, or of runs in a folder, to `path`; makes nothing if there are none.

    In the place of other files are empty ones, so that a folder of anything else is refused.
    """
    objects, folders = bucket.level()
    objects = [found for found in objects if found.name not in (LOCK_OBJECT, CLOCK_OBJECT)]
    if not objects and not folders:
        return
    path.mkdir(parents=True)
    if RUN_CONFIG not in [found.name for found in objects]:
        for found in objects:
            (path / found.name).touch()
            if found.name == SWEEP:
                bucket.get_file(SWEEP, path / SWEEP)
        has_run = bucket.each(lambda name: bucket.stat(f"{name}/{RUN_CONFIG}") is not None, folders)
        for name, is_run in zip(folders, has_run, strict=True):
            if is_run:
                download(Bucket(bucket.location / name, bucket.argument), path / name)
            else:
                (path / name).mkdir()
        return
    bucket.each(lambda found: bucket.get_file(found.name, path / found.name), objects)
    if parts := bucket.below(METRICS_PARTS):
        with open(path / METRICS, "wb") as file:
            file.writelines(bucket.each(lambda found: bucket.get(found.name) or b"", parts))


class Mirror:
    """The local copy of a folder whose lock is held: changed files are put into the bucket.

    A context manager, which puts them every EVERY seconds and at the end.
    """

    def __init__(self, path: Path, report: Callable[[str], None]):
        """Takes the lock, as `Lease` does, and makes the copy once more, now that nobody else changes it."""
        self._path, self._bucket = path, Bucket(location_of(path))
        with ExitStack() as stack:
            self.lease = stack.enter_context(Lease(self._bucket, report))
            renew(path)
            path.mkdir(parents=True, exist_ok=True)
            self._stack = stack.pop_all()
        self._put = {name: _state(path / name) for name in self._names()}
        self._growing: dict[str, _Growing] = {}
        self._mutex, self._done = threading.Lock(), threading.Event()

    def __enter__(self) -> "Mirror":
        self._thread = repeat(lambda: self.put(SHORT_PATIENCE), EVERY, self._done)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._stack:
            self._done.set()
            if not isinstance(error, OSError):  # after which the bucket would fail once more
                self._thread.join()
                self.put()

    def put(self, patience: float | None = None) -> None:
        """Puts what has changed since the last put; raises Lost first if another process took the lock.

        `patience` is that of the look whether it is still held.
        """
        with self._mutex:
            self.lease.check(patience)
            # A start may remove what another left that was killed before there was a run. From a run, only a
            # cleaner of /tmp removes files.
            is_new = RUN_CONFIG not in self._put and SWEEP not in self._put
            gone = [name for name in self._put if is_new and not (self._path / name).exists()]
            for name in self._names():
                now = _state(self._path / name)
                if self._put.get(name) != now:
                    self._bucket.put_file(name, self._path / name)
                    self._put[name] = now
            self._bucket.delete(gone)
            for name in gone:
                del self._put[name]
            self._put_growing(self._path / METRICS, METRICS_PARTS, ".jsonl", _whole_lines)
            for path in sorted((self._path / EVENTS).glob("*")):
                self._put_growing(path, f"{EVENTS}/{path.name}.", "", _whole_records)

    def _names(self) -> list[str]:
        """Files that are put whole; config.json is last, since it makes the folder a run's."""
        paths = itertools.chain(self._path.iterdir(), self._path.glob("wandb/**/*"))  # its rows if offline
        names = [path.relative_to(self._path).as_posix() for path in paths if path.is_file()]
        whole = [name for name in names if name != METRICS and not name.startswith(".")]  # drafts, a lock
        return sorted(whole, key=lambda name: (name == RUN_CONFIG, name))

    def _put_growing(self, path: Path, prefix: str, ending: str, whole: Callable[[bytes], int]) -> None:
        """Puts what was appended to a file, in parts called `{prefix}{number}{ending}`.

        `whole(data)`: how many of its first bytes belong to whole records.
        """
        if not path.exists():
            return
        with open(path, "rb") as file:
            at = self._growing.get(prefix)
            if at is None or at.inode != os.fstat(file.fileno()).st_ino:
                at = self._begun(file, prefix)
            file.seek(at.offset)
            data = file.read()
        data = data[: whole(data)]
        if len(data) != at.size:
            try:
                found = self._bucket.put(f"{prefix}{at.number:05d}{ending}", data, at.generation)
            except (Refused, OSError) as error:  # it may have been put all the same: the next time looks
                self._growing.pop(prefix, None)
                if not isinstance(error, Refused):
                    raise
                self.lease.check()  # still ours: it was the last request of a writer that had been paused
                return self._put_growing(path, prefix, ending, whole)
            at = at._replace(size=len(data), generation=found.generation)
        if len(data) >= SEALED:
            at = at._replace(offset=at.offset + len(data), number=at.number + 1, size=0, generation=ABSENT)
        self._growing[prefix] = at

    def _begun(self, file: BinaryIO, prefix: str) -> "_Growing":
        """Where to continue: after the sealed parts with which the file still begins; deletes later ones."""
        parts, offset, n = self._bucket.below(prefix), 0, 0
        while n < len(parts) and parts[n].size >= SEALED:
            if checksum(file.read(parts[n].size)) != parts[n].crc32c:
                break
            offset, n = offset + parts[n].size, n + 1
        self._bucket.delete(found.name for found in parts[n + 1 :])
        size, generation = (-1, parts[n].generation) if n < len(parts) else (0, ABSENT)
        return _Growing(os.fstat(file.fileno()).st_ino, offset, n, size, generation)


class _Growing(NamedTuple):
    """The last part of a growing file, which is put whole each time."""

    inode: int
    """Of the file: another one begins with other rows."""
    offset: int
    """Bytes of the parts before it."""
    number: int
    size: int
    """Bytes that were put; -1 if another process put it."""
    generation: int


def _state(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _whole_lines(data: bytes) -> int:
    return data.rfind(b"\n") + 1


def _whole_records(data: bytes) -> int:
    """TensorBoard's records: a length of 8 bytes, 4 of its CRC, the content, 4 of the content's CRC."""
    end = 0
    while (after := end + 16 + int.from_bytes(data[end : end + 8], "little")) <= len(data):
        end = after
    return end
