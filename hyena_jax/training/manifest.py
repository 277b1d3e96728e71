"""The manifest of a checkpoint: SHA-256 digests of its every file, by which damage is noticed."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from hyena_jax.config import open_input, read_json
from hyena_jax.training import atomic

MANIFEST = "manifest.json"


def write_manifest(checkpoint: Path) -> None:
    """Writes the digests of all files of a committed checkpoint, in one rename."""
    digests = {str(path.relative_to(checkpoint)): _digest(path) for path in _files(checkpoint)}
    atomic.write_text(checkpoint / MANIFEST, json.dumps(digests, indent=1))


def is_damaged(checkpoint: Path) -> bool:
    """Whether a file differs from the manifest, or is missing. False where there is no manifest."""
    manifest = checkpoint / MANIFEST
    if not manifest.exists():
        return False
    try:
        digests = read_json("manifest", manifest)
        return any(_digest(checkpoint / name) != digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return True


def _files(checkpoint: Path) -> Iterator[Path]:
    return (
        path
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and not path.name.startswith(MANIFEST)
    )


def _digest(path: Path) -> str:
    with open_input("checkpoint", path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
