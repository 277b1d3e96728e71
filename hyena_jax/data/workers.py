"""Work on numbered parts, shared among processes that end with the one that started them."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from hyena_jax.system.signals import begin_beside, processes_beside

LOOK_EVERY = 0.5
"""Seconds between two calls of `progress`."""

Progress = Callable[[int, int], None]
"""progress(bytes of the input read by this call, tokens written by it)."""


class _Stopped(Exception):
    """The other processes failed, so that this one ends."""


def share(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    numbers: Sequence[int],
    workers: int,
    progress: Progress,
) -> None:
    """Calls work(*arguments, number, progress) for all numbers, in several processes.

    Raises the first exception of the work, when the other processes end at their next call of `progress`;
    OSError if a process dies.
    """
    workers = min(workers, len(numbers))
    if workers <= 1:
        with _one_thread():
            for number in numbers:
                work(*arguments, number, progress)
        return
    context = processes_beside()
    counts, seen = context.Array("q", 3), (0, 0)  # bytes, tokens, and 1 to stop
    others, processes = set(multiprocessing.active_children()), set()
    pool = ProcessPoolExecutor(workers, context, _begin, (counts, work, arguments))
    try:
        with _one_thread():  # which the processes inherit
            waiting = {pool.submit(_work, number) for number in numbers}
        processes = set(multiprocessing.active_children()) - others
        while waiting:
            done, waiting = wait(waiting, LOOK_EVERY, FIRST_EXCEPTION)
            for future in done:
                future.result()
            with counts.get_lock():
                now = counts[0], counts[1]
            progress(now[0] - seen[0], now[1] - seen[1])
            seen = now
    except BrokenProcessPool:
        pool.shutdown()
        codes = [process.exitcode for process in processes]
        code = next((code for code in codes if code != -signal.SIGTERM), -signal.SIGTERM)  # as the pool sends
        raise OSError(
            f"a worker process died with exit code {code}; if it had too little memory, lower --workers"
        ) from None
    finally:
        counts[2] = 1
        pool.shutdown(cancel_futures=True)


def _begin(*given: Any) -> None:
    global _given
    _given = given
    begin_beside()


def _work(number: int) -> None:
    counts, work, arguments = _given

    def progress(n_bytes: int, n_tokens: int) -> None:
        with counts.get_lock():
            if counts[2]:
                raise _Stopped
            counts[0] += n_bytes
            counts[1] += n_tokens

    progress(0, 0)
    work(*arguments, number, progress)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The tokenizers library uses one thread in this process: there is a process for each core."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
