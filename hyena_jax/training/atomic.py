"""Files that are whole or not there, whatever happens to the process or the machine meanwhile."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 beside `path`, and renames once it is on the disk. A failure leaves `path` as it was."""
    draft = draft_of(path)
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)  # on a full disk even a draft is in the way
        raise


def draft_of(path: Path) -> Path:
    """Where a file is before it is whole; a kill leaves it behind."""
    return path.with_name(f"{path.name}.draft")
