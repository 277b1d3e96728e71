"""Files and folders that are either whole or missing, whatever happens to the process or the machine.

Each is written as a draft, a new file with an unpredictable name, and then renamed. Renaming replaces a link,
not its target: nothing outside a folder is written through links in it.
"""

import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DRAFT = re.compile(r"\.[0-9a-f]{16}\.draft|(config|data|metrics)\.(json|jsonl)\.draft")
"""Names of drafts, also from earlier versions."""


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8; a failure leaves `path` as it was."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file next to `path` for the caller to write; it replaces `path` once it is on the disk.

    A failure leaves `path` as it was. The file gets the mode that the umask gives to new files, even if its
    writer changed it.
    """
    draft = path.with_name(f".{secrets.token_hex(8)}.draft")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    mode = stat.S_IMODE(draft.stat().st_mode)
    try:
        yield draft
        draft.chmod(mode)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)  # on a full disk even a draft takes space
        raise


def remove_drafts(folder: Path) -> None:
    """Removes drafts that killed processes left in a folder that no other process writes to."""
    for path in folder.iterdir():
        if DRAFT.fullmatch(path.name) and (path.is_symlink() or path.is_file()):
            path.unlink()


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
        draft.chmod(0o777 & ~_umask())
        draft.replace(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):  # not empty: somebody else writes there
            for parent in created:
                parent.rmdir()
        raise


def _umask() -> int:
    """The process's umask, since temporary folders are only for their owner."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
