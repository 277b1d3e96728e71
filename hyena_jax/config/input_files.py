"""Reading untrusted files: regular files of a limited size, JSON of a limited depth, safetensors."""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from hyena_jax.config.checks import UserError, printable, require

if TYPE_CHECKING:
    from safetensors import safe_open

MAX_JSON = 2**27
"""Most bytes of a JSON file, 128 MiB: the largest tokenizers have 35 MiB."""
MAX_CODE = 2**24
"""Most bytes of a Python file."""
MAX_DEPTH = 100
"""Most levels of nested lists and objects in JSON."""
TOO_DEEP = f"JSON must be at most {MAX_DEPTH} lists and objects deep"
HOLES_FROM, LEAST_DATA = 2**26, 1 / 16
"""At least the second part of a file must have been written if it has at least the first number of bytes."""


@contextlib.contextmanager
def open_input(argument: str, path: str | Path, most: int | None = None) -> Iterator[BinaryIO]:
    """A regular file of at most `most` bytes, open for reading.

    Pipes and devices may be endless. A sparse file may claim any size; one that is nearly all holes was never
    written.

    Raises:
      UserError: if `path` is not such a file or cannot be read; it names `argument`, the path and the reason.
    """
    try:
        _require_regular(argument, path, os.stat(path))  # opening a device may already have an effect
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except UserError:
        raise
    except (OSError, ValueError) as error:  # the latter for a path with a null character
        raise UserError(f"{argument} {str(path)!r} cannot be read: {error}") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)  # of the opened file, in case the path has changed since
        _require_regular(argument, path, status)
        size = status.st_size
        require(most is None or size <= most, argument, str(path), f"a file of at most {most} bytes")
        if size >= HOLES_FROM and _is_nearly_empty(descriptor, size):
            raise UserError(f"{argument} {str(path)!r} is a sparse file, most of which was never written")
        yield file


def read_bytes(argument: str, path: str | Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises what `open_input` does."""
    with open_input(argument, path, most) as file:
        try:
            return file.read(os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise UserError(f"{argument} {str(path)!r} cannot be read: {error}") from error


def read_json(argument: str, path: str | Path, most: int = MAX_JSON) -> Any:
    """The value in a JSON file. Raises what `open_input` and `parse_json` do."""
    data = read_bytes(argument, path, most)
    try:
        return parse_json(data)
    except UserError as error:
        raise UserError(f"{argument} {str(path)!r} cannot be read: {error}") from error


@contextlib.contextmanager
def open_safetensors(argument: str, path: str | Path, most: int | None = None) -> Iterator["safe_open"]:
    """A safetensors file. Its header has at most 100 MB and fits the file's size: the library checks it.

    Raises:
      UserError: as `open_input` does, or if the header is wrong or the caller reads a missing array.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with open_input(argument, path, most), safe_open(path, "numpy") as file:
            yield file
    except SafetensorError as error:
        raise UserError(f"{argument} {str(path)!r} cannot be read: {printable(error)[:200]}") from error


def parse_json(text: str | bytes) -> Any:
    """The value of an untrusted JSON text, at most MAX_DEPTH deep, so that recursion over it is safe.

    Raises:
      UserError: if the text is not JSON, saying where, or is too deep.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise UserError(TOO_DEEP) from None
    except ValueError as error:
        raise UserError(f"not JSON: {error}") from error
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise UserError(TOO_DEEP)
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return value


def memory_size() -> int:
    """Bytes of memory of this machine, or of the container if it has fewer."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or `max`
            size = min(size, int(Path(limit).read_text()))
    return size


def _require_regular(argument: str, path: str | Path, status: os.stat_result) -> None:
    require(stat.S_ISREG(status.st_mode), argument, str(path), f"a file, not a {_kind(status.st_mode)}")


def _kind(mode: int) -> str:
    for is_kind, name in ((stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket")):
        if is_kind(mode):
            return name
    return "device"


def _is_nearly_empty(descriptor: int, size: int) -> bool:
    """Whether less than LEAST_DATA of a file was written; False if the file system cannot say."""
    if not hasattr(os, "SEEK_HOLE"):
        return False
    written, end = 0, 0
    try:
        while written < LEAST_DATA * size:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            written += end - start
    except OSError as error:  # ENXIO: no data after `end`; other errors: no such seek
        return error.errno == errno.ENXIO
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)
    return False
