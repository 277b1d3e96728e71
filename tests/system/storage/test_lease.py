"""One owner at a time: races, takeover of a dead owner, an owner that was paused."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from hyena_jax.system.errors import UserError
from hyena_jax.system.storage import lease
from hyena_jax.system.storage.bucket import Bucket
from hyena_jax.system.storage.lease import LOCK_OBJECT, Lease, Lost
from hyena_jax.system.storage.location import Location

SHORT = 1.0
"""Seconds of a lease in these tests."""
# Holds the lock until it is killed, or says why it cannot any more. Arguments: URL, seconds.
HOLDER = """
import sys, time
from hyena_jax.system.storage.bucket import Bucket
from hyena_jax.system.storage.lease import Lease, Lost
from hyena_jax.system.storage.location import Location

with Lease(Bucket(Location.parse(sys.argv[1], "workdir")), print, float(sys.argv[2])) as lease:
    print("held", flush=True)
    try:
        while True:
            lease.raise_if_lost()
            time.sleep(0.02)
    except Lost as error:
        print(error, flush=True)
"""


def opened(url: str) -> Bucket:
    return Bucket(Location.parse(url, "workdir"))


@pytest.fixture
def holder(bucket):
    """A process that holds the lock of `bucket`."""
    command = [sys.executable, "-c", HOLDER, bucket, str(SHORT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.fixture
def slept(monkeypatch):
    """The seconds that the lease chose to sleep: a loaded machine, and tries again, do not make them more."""
    seconds = []

    def counted(duration):
        seconds.append(duration)
        time.sleep(duration)

    monkeypatch.setattr(lease, "time", SimpleNamespace(sleep=counted, monotonic=time.monotonic))
    return seconds


def test_a_lease_is_renewed_every_quarter_of_it(monkeypatch):
    asked = []
    monkeypatch.setattr(lease, "repeat", lambda do, every, done: asked.append(every))
    free = SimpleNamespace(stat=lambda name: None, put=lambda *about: SimpleNamespace(generation=1))
    with Lease(free, print, 60):
        assert asked == [15]


def test_a_lock_is_held_and_freed(bucket):
    lines = []
    with Lease(opened(bucket), lines.append) as lease:
        lease.check()
        owner = json.loads(opened(bucket).get(LOCK_OBJECT))
        assert owner["process"] == os.getpid()
        lease.check()
    with Lease(opened(bucket), lines.append):
        pass
    assert lines == []


def test_a_living_owner_keeps_it(holder, bucket, slept):
    lines = []
    with pytest.raises(UserError, match=rf"workdir 'gs://.*' is in use: process {holder.pid} on .* writes"):
        Lease(opened(bucket), lines.append, SHORT)
    assert 0 < sum(slept) < SHORT
    assert len(lines) == 1
    assert "waiting up to" in lines[0]


@pytest.mark.grid
def test_a_dead_owner_is_followed_after_a_lease(holder, bucket, slept):
    holder.kill()
    with Lease(opened(bucket), print, SHORT) as lease:
        assert sum(slept) < 2 * SHORT
        lease.check()


@pytest.mark.grid
def test_an_owner_that_was_paused_is_told(holder, bucket):
    os.kill(holder.pid, signal.SIGSTOP)
    with Lease(opened(bucket), print, SHORT) as lease:
        os.kill(holder.pid, signal.SIGCONT)
        assert "was taken over by another process" in holder.stdout.readline()
        lease.check()


def test_a_check_is_refused_after_a_takeover(bucket):
    slow = Lease(opened(bucket), print, 100.0)
    found = opened(bucket).stat(LOCK_OBJECT)
    opened(bucket).put(LOCK_OBJECT, b"{}", found.generation)
    for _ in range(2):
        with pytest.raises(Lost):
            slow.check()
    with pytest.raises(Lost):
        slow.raise_if_lost()
    with slow:
        pass
    assert opened(bucket).get(LOCK_OBJECT) == b"{}"  # not freed for another owner


def race(url: str, is_stale: bool) -> list[str]:
    """What two threads get that ask for one lock at the same time: `won` or `in use`."""
    buckets = [opened(url), opened(url)]
    if is_stale:
        buckets[0].put(LOCK_OBJECT, b"{}")
    barrier, got = threading.Barrier(2), []

    def ask(bucket: Bucket) -> None:
        bucket.stat(LOCK_OBJECT)  # connects
        if is_stale:
            time.sleep(0.25)
        barrier.wait()
        try:
            lease = Lease(bucket, print, 0.2 if is_stale else 60.0)
            got.append("won")
        except UserError:
            lease = None
            got.append("in use")
        barrier.wait()
        if lease is not None:
            lease.__exit__(None, None, None)

    threads = [threading.Thread(target=ask, args=(one,)) for one in buckets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(got)


@pytest.mark.parametrize("is_stale", [False, True], ids=["free", "of a dead owner"])
@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.cloud)])
def test_a_race_has_one_winner(bucket, is_stale, rounds):
    assert [race(f"{bucket}/{i}", is_stale) for i in range(rounds)] == rounds * [["in use", "won"]]


def test_a_lock_is_freed_only_if_it_is_still_the_one_that_was_taken():
    """A server refuses a put for another generation; here without one."""
    held = Lease.__new__(Lease)
    held._bucket, held._generation, held._is_lost = Mock(), 7, False
    held._mutex, held._done = threading.Lock(), threading.Event()
    held.__exit__(None, None, None)
    held._bucket.put.assert_called_once_with(LOCK_OBJECT, b"", 7, lease.SHORT_PATIENCE)
