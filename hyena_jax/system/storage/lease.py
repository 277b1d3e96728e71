"""The lock of a folder in a bucket: an object that its owner renews. A dead owner loses it after a lease.

    lock.json    who holds the lock; renewed every quarter of a lease; empty once it is free
    clock.json   put by each start, to learn the time of the server

Ages are differences of the server's times: the clocks of machines do not matter. Every renewal is put on the
condition that the lock is still the one that its owner put last, so an owner that was paused while another
process took the lock over is refused.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import TracebackType

from hyena_jax.system.errors import UserError, printable
from hyena_jax.system.storage.bucket import ABSENT, Bucket, Found, Refused

LOCK_OBJECT, CLOCK_OBJECT = "lock.json", "clock.json"
SHORT_PATIENCE = 10.0
"""Seconds of patience of those who can try again, or only want to know."""
SECONDS = 60.0
"""Without a renewal for so long, the owner counts as dead. An object may be put about once a second."""


class Lost(OSError):
    """Another process holds the lock now: this one must not write any more."""


def repeat(do: Callable[[], None], every: float, done: threading.Event) -> threading.Thread:
    """Starts a thread that calls `do` every so many seconds until `done` is set, or the lock is lost.

    It continues where the bucket does not answer: the lock may still be held.
    """

    def call() -> None:
        while not done.wait(every):
            try:
                do()
            except Lost:
                return
            except OSError:
                continue

    thread = threading.Thread(target=call, name="repeat", daemon=True)
    thread.start()
    return thread


class Lease(AbstractContextManager):
    """The lock, held; a context manager, which frees it."""

    def __init__(self, bucket: Bucket, report: Callable[[str], None], seconds: float | None = None):
        """Takes the lock; UserError if another process holds it.

        If it is held, waits, after a line to `report`, until its owner renews it, or has not for a lease.
        """
        self._bucket, self._seconds = bucket, SECONDS if seconds is None else seconds
        about = {"owner": uuid.uuid4().hex, "machine": socket.gethostname(), "process": os.getpid()}
        self._content = json.dumps(about).encode()
        self._generation = self._taken(report)
        self._is_lost = False
        self._mutex, self._done = threading.Lock(), threading.Event()
        repeat(lambda: self.check(SHORT_PATIENCE), self._seconds / 4, self._done)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        with self._mutex, suppress(Refused, OSError):  # it ends by itself
            if not self._is_lost:
                self._bucket.put(LOCK_OBJECT, b"", self._generation, SHORT_PATIENCE)

    def check(self, patience: float | None = None) -> None:
        """Renews the lock now, so that what is written next is written by its owner; else raises Lost."""
        with self._mutex:
            self.raise_if_lost()
            try:
                found = self._bucket.put(LOCK_OBJECT, self._content, self._generation, patience)
                self._generation = found.generation
            except Refused:
                self._is_lost = True
            self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """Raises Lost if that is known already; asks nobody."""
        if self._is_lost:
            raise Lost(
                f"{self._bucket.location} was taken over by another process, since this one was silent for"
                f" {self._seconds:.0f} s; this one stops, and writes no more"
            )

    def _taken(self, report: Callable[[str], None]) -> int:
        """Takes the lock; returns the generation of its object."""
        found = self._bucket.stat(LOCK_OBJECT)
        if found is not None and found.size > 0:
            found = self._outlived(found, report)
        try:
            generation = ABSENT if found is None else found.generation
            return self._bucket.put(LOCK_OBJECT, self._content, generation).generation
        except Refused as error:
            raise self._in_use() from error

    def _outlived(self, lock: Found, report: Callable[[str], None]) -> Found | None:
        """The lock that may be taken, now that its owner is dead or has freed it."""
        now = self._bucket.put(CLOCK_OBJECT, self._content).updated
        left = self._seconds - (now - lock.updated).total_seconds()
        if left > self._seconds / 4:
            report(
                f"waiting up to {left:.0f} s to learn whether {self._owner()}, which holds the lock of"
                f" {self._bucket.location}, is alive"
            )
        deadline = time.monotonic() + left
        while time.monotonic() < deadline:
            time.sleep(self._seconds / 60)
            found = self._bucket.stat(LOCK_OBJECT)
            if found is None or found.size == 0:
                return found
            if found.generation != lock.generation:
                raise self._in_use()
        return lock

    def _owner(self) -> str:
        try:
            about = json.loads(self._bucket.get(LOCK_OBJECT) or b"{}")
            return printable(f"process {about['process']} on {about['machine']}")
        except (ValueError, KeyError, TypeError):
            return "another process"

    def _in_use(self) -> UserError:
        where = str(self._bucket.location)
        return UserError(f"{where!r} is in use: {self._owner()} writes there", self._bucket.argument)
