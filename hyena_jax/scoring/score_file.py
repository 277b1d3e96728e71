"""A file of scores: one JSON object per line, the first about the file, then one for each text.

Lines are written in the order of the texts and flushed: a kill leaves whole lines, and at most one torn line.
The first line holds everything that the other lines depend on: the same scoring continues the file, and
another one is refused.
"""

import fcntl
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hyena_jax.data.dataset import perplexity
from hyena_jax.scoring.score import Likelihood
from hyena_jax.system.errors import UserError, require

ABOUT = "scores"
"""Key of the first line's object."""
Row = Mapping[str, Any]
"""The JSON object of a text."""
CHECKSUM = "crc32"
COUNTED = ("tokens", "scored", "bytes", "log_likelihood")
"""What the total needs of a row."""


def row(name: str, found: Likelihood, per_token: bool) -> Row:
    """The JSON object of a text; null for what is not known or not finite.

    `per_token` adds `ids` and `log_probs`, one for each token: null for a first token that is not scored,
    else nine digits, which identify a float32.
    """
    values = {
        "name": name,
        "tokens": len(found.tokens),
        "scored": len(found.log_probs),
        "bytes": found.n_bytes,
        "log_likelihood": found.log_likelihood,
        "bits_per_byte": found.bits_per_byte,
        "perplexity": found.perplexity,
    }
    values = {key: _finite(value) if isinstance(value, float) else value for key, value in values.items()}
    if per_token:
        unscored = [None] * (len(found.tokens) - len(found.log_probs))
        values["ids"] = found.tokens.tolist()
        values["log_probs"] = unscored + [_finite(float(f"{x:.9g}")) for x in found.log_probs.tolist()]
    return with_checksum(values)


def with_checksum(values: Row) -> Row:
    """The row with a checksum of its other values, by which a file that is continued knows its lines."""
    values = {name: value for name, value in values.items() if name != CHECKSUM}
    return {**values, CHECKSUM: f"{zlib.crc32(text_of(values).encode()):08x}"}


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def total(rows: Sequence[Row]) -> str:
    """All texts together, on one line, from the COUNTED values of each; bits per byte as in `Likelihood`."""
    n_tokens, n_scored = (sum(row[name] for row in rows) for name in ("tokens", "scored"))
    line = f"{len(rows):,} texts, {n_scored:,} of {n_tokens:,} tokens scored"
    if n_scored == 0:
        return line
    known = (row["log_likelihood"] for row in rows)
    nats = -math.fsum(math.nan if likelihood is None else likelihood for likelihood in known) / n_scored
    line += f": {nats:.6g} nats a token, perplexity {perplexity(nats):.6g}"
    if any(row["bytes"] is None for row in rows):
        return line
    return f"{line}, {nats / math.log(2) * n_tokens / sum(row['bytes'] for row in rows):.6g} bits a byte"


def text_of(values: Mapping[str, Any]) -> str:
    """A line of the file."""
    return json.dumps(values, ensure_ascii=False) + "\n"


@contextmanager
def continued(
    path: Path, about: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[list[Row], Callable[[Sequence[Row]], None]]]:
    """Opens a new file of scores, or one that the same scoring began.

    Scorings are the same if their JSON values `about` are equal, and the rows are of the first of `names`, in
    this order. Any other file, or one that another process writes, is refused and stays unchanged.

    Yields:
      The rows that are in it, with their COUNTED values, and a function that appends rows.
    """
    is_free = path.parent.is_dir() and (path.is_file() or not path.exists())
    require(is_free, "output", str(path), "a new file, or one with scores, in an existing folder")
    head = text_of({ABOUT: about})
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with open(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"output {str(path)!r} is in use: another process writes it") from error
        rows, size = [], 0
        for number, line in enumerate(file):
            if number == 0:
                _check_head(path, line, head, about)
            if not line.endswith(b"\n"):  # torn by a kill
                break
            size += len(line)
            if number > 0:
                must = f"at most {len(names)} rows"
                require(number <= len(names), f"output {str(path)!r}", f"{number} rows or more", must)
                rows.append(_read(path, number + 1, line, names[number - 1]))
        file.truncate(size)
        file.seek(size)

        def append(texts: str) -> None:
            file.write(texts.encode())
            file.flush()
            os.fsync(file.fileno())

        if size == 0:
            append(head)
        yield rows, lambda new: append("".join(map(text_of, new)))


def _check_head(path: Path, line: bytes, head: str, about: Mapping[str, Any]) -> None:
    if line == head.encode() or (not line.endswith(b"\n") and head.encode().startswith(line)):
        return
    try:
        theirs = dict(json.loads(line)[ABOUT])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        must = "a new file, or one with scores, which begins with a line about itself"
        raise UserError(f"must be {must}, got {str(path)!r}", "output") from error
    names = [name for name in {**about, **theirs} if about.get(name) != theirs.get(name)]
    changes = "; ".join(f"{name} {theirs.get(name)!r} -> {about.get(name)!r}" for name in names)
    raise UserError(f"output {str(path)!r} holds other scores ({changes}); give a new file")


def _read(path: Path, number: int, line: bytes, name: str) -> Row:
    """The COUNTED values of the row of this text, checked."""
    try:
        read = json.loads(line)
        if text_of(with_checksum(read)).encode() != line:  # as bytes: 1E-05 is 1e-05 with a flipped bit
            raise ValueError(f"its {CHECKSUM} is another")
        if read["name"] != name:
            raise ValueError(f"it is of the text {read['name']!r:.80}, not {name!r:.80}")
        row = {name: read[name] for name in COUNTED}
        n_tokens, n_scored, n_bytes, likelihood = row.values()
        is_count = all(type(n) is int and n >= 0 for n in (n_tokens, n_scored, n_bytes or 0))
        if not is_count or n_scored > n_tokens or (n_tokens > 0 and n_bytes == 0):
            raise ValueError(f"its values are {row}")
        if likelihood is not None and type(likelihood) not in (int, float):
            raise ValueError(f"its log_likelihood is {likelihood!r}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"line {number} of output {str(path)!r} is damaged: {error!r}") from error
    return row
