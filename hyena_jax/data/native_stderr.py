"""Silencing native libraries, which write to the file descriptor of the standard error."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Discards what is written to file descriptor 2: C++ and Rust bypass `sys.stderr`."""
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed: nothing can be written
        yield
        return
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
