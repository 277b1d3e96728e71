"""A file of scores: one JSON object per line, the first about the file, then one for each text.

Lines are written in the order of the texts and flushed: a kill leaves whole lines, and at most one torn line.
The first line holds everything that the other lines depend on: the same scoring continues the file, and
another one is refused.
"""

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hyena_jax.config import UserError, require
from hyena_jax.data.dataset import perplexity
from hyena_jax.scoring.score import Likelihood

ABOUT = "scores"
"""Key of the first line's object."""


class TextSums(NamedTuple):
    """What the total needs of a text."""

    n_tokens: int
    n_scored: int
    n_bytes: int | None
    log_likelihood: float


def row(name: str, found: Likelihood, per_token: bool) -> dict[str, Any]:
    """The JSON object of a text; null for what is not known or not finite.

    Args:
      per_token: add `ids` and `log_probs`, one for each token: null for a first token that is not scored,
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
    return values


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def sums(row: Mapping[str, Any]) -> TextSums:
    """The part of a row that the total needs. Raises ValueError if a value cannot be that of a text."""
    found = TextSums(row["tokens"], row["scored"], row["bytes"], row["log_likelihood"])
    counts = [found.n_tokens, found.n_scored, found.n_bytes or 0]
    is_count = all(type(n) is int and n >= 0 for n in counts) and found.n_scored <= found.n_tokens
    likelihood = math.nan if found.log_likelihood is None else found.log_likelihood
    if not is_count or type(likelihood) not in (int, float) or (found.n_tokens > 0 and found.n_bytes == 0):
        raise ValueError(f"its values are {found}")
    return found._replace(log_likelihood=likelihood)


def total(rows: Sequence[TextSums]) -> str:
    """All texts together, on one line; bits per byte as `Likelihood.bits_per_byte`."""
    n_tokens, n_scored = sum(row.n_tokens for row in rows), sum(row.n_scored for row in rows)
    line = f"{len(rows):,} texts, {n_scored:,} of {n_tokens:,} tokens scored"
    if n_scored == 0:
        return line
    nats = -math.fsum(row.log_likelihood for row in rows) / n_scored
    line += f": {nats:.6g} nats a token, perplexity {perplexity(nats):.6g}"
    if any(row.n_bytes is None for row in rows):
        return line
    return f"{line}, {nats / math.log(2) * n_tokens / sum(row.n_bytes for row in rows):.6g} bits a byte"


def text_of(values: Mapping[str, Any]) -> str:
    """A line of the file."""
    return json.dumps(values, ensure_ascii=False) + "\n"


@contextmanager
def continued(
    path: Path, about: Mapping[str, Any], n_texts: int
) -> Iterator[tuple[list[TextSums], Callable[[Sequence[Mapping[str, Any]]], None]]]:
    """Opens a new file of scores, or one that the same scoring began.

    Yields:
      The sums of the rows that are in it, and a function that appends rows.

    Args:
      about: JSON values that the scores depend on.

    Raises:
      UserError: if the file holds other scores or something else, or another process writes it; it is then
        unchanged.
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
                rows.append(_read(path, number + 1, line))
        require(len(rows) <= n_texts, f"output {str(path)!r}", f"{len(rows)} rows", f"at most {n_texts} rows")
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


def _read(path: Path, number: int, line: bytes) -> TextSums:
    try:
        return sums(json.loads(line))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"line {number} of output {str(path)!r} is damaged: {error!r}") from error
