"""The lock of a folder that one process writes to at a time."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hyena_jax.config import UserError, require
from hyena_jax.training import atomic

LOCK = ".lock"


@contextmanager
def locked(workdir: Path) -> Iterator[int]:
    """Creates the folder if it is missing, and locks it; the lock ends with the process, however it ends.

    Yields the descriptor of the lock: a process that inherits it holds the lock too.

    If the block fails before anything else is in a folder that was created here, the folder is removed.

    Raises:
      UserError: if another process trains here, or a file is in the way.
    """
    is_new = not workdir.exists()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"workdir {str(workdir)!r} cannot be created: {error.strerror}") from error
    try:
        lock = os.open(workdir / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UserError(f"{workdir / LOCK} must be a file, but is a symbolic link: remove it") from error
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"workdir {str(workdir)!r} is in use: another process trains there") from error
        # A start that fails removes its lock file; a process that had opened it then locks nothing.
        is_ours = os.path.samestat(os.fstat(lock), (workdir / LOCK).stat())
        require(is_ours, "workdir", str(workdir), "a folder that no other process removes")
        atomic.remove_drafts(workdir)
        try:
            yield lock
        except BaseException:
            with suppress(OSError):
                if is_new and [path.name for path in workdir.iterdir()] == [LOCK]:
                    (workdir / LOCK).unlink()
                    workdir.rmdir()
            raise
