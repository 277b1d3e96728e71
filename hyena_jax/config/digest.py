"""JSON files with a digest of their values, so that a flipped bit is noticed."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from hyena_jax.errors import UserError

KEY = "sha256"


def with_digest(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, and their SHA-256 under KEY."""
    values = {name: value for name, value in values.items() if name != KEY}
    return {KEY: _digest(values)} | values  # first, so that a person can delete its line and leave valid JSON


def without_digest(values: Any) -> Any:
    """The inverse of `with_digest`; values without a digest, from earlier versions, are returned unchanged.

    Raises:
      UserError: if the digest does not match the values.
    """
    if not isinstance(values, Mapping) or KEY not in values:
        return values
    rest = {name: value for name, value in values.items() if name != KEY}
    if values[KEY] != _digest(rest):
        raise UserError(
            f"it was damaged or edited: its {KEY} does not match its values (if you edited it, delete the"
            f" line {KEY!r})"
        )
    return rest


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
