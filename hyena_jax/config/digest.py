"""JSON files that carry a digest of what they hold, so that a bit that flipped is noticed."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from hyena_jax.config.checks import UserError

KEY = "sha256"


def with_digest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Under KEY, the SHA-256 of all values, and the values."""
    values = {name: value for name, value in values.items() if name != KEY}
    return {KEY: _digest(values)} | values  # first: a person can delete its line, and leaves JSON


def without_digest(values: Any) -> Any:
    """The inverse of `with_digest`; what has no digest, as earlier versions wrote it, is returned as it is.

    Raises:
      UserError: if the digest is that of other values.
    """
    if not isinstance(values, Mapping) or KEY not in values:
        return values
    rest = {name: value for name, value in values.items() if name != KEY}
    if values[KEY] != _digest(rest):
        raise UserError(
            f"it was damaged or edited: its {KEY} is that of other values (if you edited it, delete the line"
            f" {KEY!r})"
        )
    return rest


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
