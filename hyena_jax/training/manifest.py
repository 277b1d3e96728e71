"""The manifest of a checkpoint: SHA-256 digests of all its files, to detect damage."""

import hashlib
import json
from pathlib import Path

from hyena_jax import files
from hyena_jax.config import UserError, open_input, read_json

MANIFEST = "manifest.json"


def write_manifest(checkpoint: Path) -> None:
    """Writes the digests of all files of a committed checkpoint, in one rename."""
    names = [name for name in _files(checkpoint) if name != MANIFEST]
    digests = {name: _digest(checkpoint / name) for name in names}
    files.write_text(checkpoint / MANIFEST, json.dumps(digests, indent=1))


def is_verified(checkpoint: Path) -> bool:
    """Whether there is a manifest; without one, damage cannot be detected."""
    return (checkpoint / MANIFEST).exists()


def damage_in(checkpoint: Path) -> str | None:
    """The first difference from the manifest, on one line; None if there is none, or no manifest.

    Pipes, devices and links count as damage: Orbax may only open files.
    """
    try:
        files = _files(checkpoint)
        if not is_verified(checkpoint):
            return None
        digests = read_json("manifest", checkpoint / MANIFEST)
        if not isinstance(digests, dict):
            return f"{MANIFEST} is not an object"
        for name, digest in digests.items():
            if name not in files:
                return f"{name} is missing"
            if _digest(checkpoint / name) != digest:
                return f"{name} is not what was saved"
    except (OSError, UserError) as error:
        return str(error)
    return None


def _files(checkpoint: Path) -> list[str]:
    """Names of all files, relative to the folder; UserError if anything in it is not a file or folder."""
    names = []
    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise UserError(f"{name} is not a regular file")
        if path.is_file() and not files.DRAFT.fullmatch(path.name):
            names.append(name)
    return names


def _digest(path: Path) -> str:
    with open_input("file", path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
