"""Files and folders: written as a whole or not at all, locked by one process, read without trust."""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from hyena_jax.system.errors import UserError, is_unicode, printable, require

if TYPE_CHECKING:
    import numpy as np
    from safetensors import safe_open

# Names in the folder of a run, of a sweep and of a checkpoint; W&B names its own folder.
RUN_CONFIG, METRICS, SWEEP, MANIFEST = "config.json", "metrics.jsonl", "sweep.json", "manifest.json"
EVENTS, WANDB = "tensorboard", "wandb"
STEP_FOLDER = re.compile("0|[1-9][0-9]*")
LOCK = ".lock"
DRAFT = re.compile(r"\.[0-9a-f]{16}\.draft")
"""Names of drafts: see `replacing`."""
MAX_JSON = 2**27
"""Most bytes of a JSON file, 128 MiB: the largest tokenizers have 35 MiB."""
MAX_DEPTH = 100
"""JSON is refused if its lists and objects are nested deeper than this."""
HOLES_FROM, LEAST_DATA = 2**26, 1 / 16
"""A file of at least HOLES_FROM bytes is refused if less than LEAST_DATA of it was ever written."""


def write_text(path: Path, text: str, is_new: bool = False) -> None:
    """Writes UTF-8, as `replacing` does; a failure leaves `path` as it was."""
    with replacing(path, is_new) as draft:
        draft.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path, is_new: bool = False) -> Iterator[Path]:
    """An empty draft next to `path` for the caller to write; it replaces `path` once it is on the disk.

    With `is_new`, UserError if there is something by then, which stays as it is.

    A failure leaves `path` as it was. The file's mode is that of new files, even if its writer changed it. A
    link is replaced, not its target: nothing outside a folder is written through links in it.
    """
    draft = path.with_name(f".{secrets.token_hex(8)}.draft")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    mode = stat.S_IMODE(draft.stat().st_mode)
    try:
        yield draft
        draft.chmod(mode)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        try:
            if is_new:
                path.touch(exist_ok=False)
        except FileExistsError as error:
            raise UserError(
                f"{str(path)!r} was made by somebody else meanwhile, and is left alone"
            ) from error
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)  # on a full disk even a draft takes space
        raise


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A draft folder next to `folder`, renamed to it once complete; until then `folder` does not exist.

    A failure also removes the parents of `folder` that did not exist before.
    """
    folder = folder.absolute()
    created = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield draft
        mask = os.umask(0)  # that of the process: temporary folders are only for their owner
        os.umask(mask)
        draft.chmod(0o777 & ~mask)
        draft.replace(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):  # not empty: somebody else writes there
            for parent in created:
                parent.rmdir()
        raise


@contextmanager
def locked(workdir: Path) -> Iterator[int]:
    """Creates the folder if it is missing, and locks it; the lock ends with the process, however it ends.

    Yields the descriptor of the lock: a process that inherits it holds the lock too. UserError if another
    process holds it. If the block fails before anything else is in a new folder, the folder is removed.
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
        # Another process that failed to start may have removed the file between our open and our lock. Our
        # lock on the removed file would keep nobody out.
        is_ours = os.path.samestat(os.fstat(lock), (workdir / LOCK).stat())
        require(is_ours, "workdir", str(workdir), "a folder that no other process removes")
        for path in workdir.iterdir():  # drafts that killed processes left
            if DRAFT.fullmatch(path.name) and (path.is_symlink() or path.is_file()):
                path.unlink()
        try:
            yield lock
        except BaseException:
            with suppress(OSError):
                if is_new and [path.name for path in workdir.iterdir()] == [LOCK]:
                    (workdir / LOCK).unlink()
                    workdir.rmdir()
            raise


def require_free(argument: str, folder: Path) -> None:
    """Refuses a folder in which something would be overwritten, and a link, which could not be replaced."""
    require(is_unicode(folder), argument, str(folder), "a path in UTF-8")
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(is_free and not folder.is_symlink(), argument, str(folder), "a new or an empty folder")
    parent = next(parent for parent in folder.absolute().parents if parent.exists())
    can_write = parent.is_dir() and os.access(parent, os.W_OK)
    require(can_write, argument, str(folder), f"in a folder that can be written, but {str(parent)!r} is none")


def require_can_hold_files(argument: str, folder: Path) -> None:
    """Refuses a path at which there is no folder that can be written, and none can be made."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        must = f"a folder that can be written ({str(place)!r}: {error.strerror})"
        require(False, argument, str(folder), must)


def require_own_folder(argument: str, folder: Path, of: str, file: str, key: str) -> None:
    """Refuses a folder with files, unless they are an earlier `of`'s: `file` is a JSON object with `key`."""
    require(is_unicode(folder), argument, str(folder), "a path in UTF-8")
    require_can_hold_files(argument, folder)
    if folder.exists():
        names = {path.name for path in folder.iterdir()}
        allowed = f"new, empty, or of an earlier {of}"
        found = read_json(argument, folder / file) if file in names else None
        is_own = isinstance(found, dict) and key in found
        require(not names or is_own, argument, str(folder), allowed)


def require_new_file(argument: str, path: Path) -> None:
    """Refuses a file that exists, and a folder in which it cannot be made."""
    require(is_unicode(path), argument, str(path), "a path in UTF-8")
    is_new = not path.exists() and not path.is_symlink()
    require(is_new, argument, str(path), "a file that does not exist yet")
    can_write = path.parent.is_dir() and os.access(path.parent, os.W_OK)
    require(can_write, argument, str(path), "a file in an existing folder that can be written")


@contextmanager
def open_input(argument: str, path: str | Path, most: int | None = None) -> Iterator[BinaryIO]:
    """A regular file of at most `most` bytes, open for reading; UserError about `argument` if it is not.

    Pipes and devices may be endless. A sparse file may claim any size; one that is nearly all holes was never
    written.
    """
    try:
        _require_regular(argument, path, os.stat(path))  # opening a device may already have an effect
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except UserError:
        raise
    except (OSError, ValueError) as error:  # the latter for a path with a null character
        raise UserError(f"{str(path)!r} cannot be read: {error}", argument) from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)  # of the opened file, in case the path has changed since
        _require_regular(argument, path, status)
        size = status.st_size
        require(most is None or size <= most, argument, str(path), f"a file of at most {most} bytes")
        if size >= HOLES_FROM and _is_nearly_empty(descriptor, size):
            raise UserError(f"{argument} {str(path)!r} is a sparse file, most of which was never written")
        yield file


def _require_regular(argument: str, path: str | Path, status: os.stat_result) -> None:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "device")
    require(stat.S_ISREG(status.st_mode), argument, str(path), f"a file, not a {kind}")


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


def read_bytes(argument: str, path: str | Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes; see `open_input`."""
    with open_input(argument, path, most) as file:
        try:
            return file.read(os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise UserError(f"{str(path)!r} cannot be read: {error}", argument) from error


def read_json(argument: str, path: str | Path) -> Any:
    """The value in a JSON file; see `open_input` and `parse_json`."""
    data = read_bytes(argument, path, MAX_JSON)
    try:
        return parse_json(data)
    except UserError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}", argument) from error


def parse_json(text: str | bytes) -> Any:
    """The value of an untrusted JSON text at most MAX_DEPTH deep, for safe recursion; UserError otherwise."""
    too_deep = f"JSON must be at most {MAX_DEPTH} lists and objects deep"
    try:
        value = json.loads(text)
    except RecursionError:
        raise UserError(too_deep) from None
    except ValueError as error:
        raise UserError(f"not JSON: {error}") from error
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise UserError(too_deep)
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return value


@contextmanager
def open_safetensors(argument: str, path: str | Path) -> Iterator["safe_open"]:
    """A safetensors file; UserError if its header is wrong, also if the caller reads a missing array.

    The library checks that the header has at most 100 MB and fits the file's size.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with open_input(argument, path), safe_open(path, "numpy") as file:
            yield file
    except SafetensorError as error:
        raise UserError(f"{str(path)!r} cannot be read: {printable(error)[:200]}", argument) from error


def write_safetensors(path: Path, arrays: Mapping[str, "np.ndarray"], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file to the disk: the same arrays and metadata give the same bytes."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    # The library writes the memory of an array as it lies.
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    try:
        save_file(arrays, path, dict(metadata))
    except SafetensorError as error:  # without the path, which may be a draft's
        raise OSError(f"a safetensors file could not be written: {error}") from error
    with open(path, "r+b") as file:  # the library writes the metadata in the order of a hash map
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))
        file.flush()
        os.fsync(file.fileno())


def n_cpus() -> int:
    """CPUs that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")  # of Linux
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def memory_size() -> int:
    """Bytes of memory of this machine, or of the container if it has fewer."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or `max`
            size = min(size, int(Path(limit).read_text()))
    return size


def resident_bytes(field: str, process: int | str = "self") -> int:
    """A process's resident memory on Linux, VmRSS now or VmHWM at its peak; 0 once the process has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"{field}:\s+(\d+)", status)
    return 1024 * int(found[1]) if found else 0
