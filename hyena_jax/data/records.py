"""The records of a file: the lines of a text, or the sequences of a FASTA file."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from hyena_jax.data.text import BYTE_ORDER_MARK, MEMORY_PER_BYTE, decoded
from hyena_jax.system.errors import printable, require
from hyena_jax.system.files import memory_size, read_bytes

FASTA = (".fa", ".fasta", ".fna", ".ffn", ".faa")
"""Suffixes of files that are read as FASTA by default."""

Format = Literal["auto", "lines", "fasta"]


class Record(NamedTuple):
    """A text with a name."""

    name: str
    """The number of a line, from 1; the first word of a FASTA header."""
    text: str


def read_records(path: Path, file_format: Format = "auto") -> list[Record]:
    """The records of a UTF-8 file, in its order; the format `auto` goes by the suffix: see FASTA.

    A line is a record without its newline, even if it is empty. A FASTA record is what follows a header
    `>NAME description`, in upper and lower case as it stands, without white space.
    """
    data = read_bytes("path", path, memory_size() // MEMORY_PER_BYTE)
    text = decoded("path", data, repr(str(path))).removeprefix(BYTE_ORDER_MARK)
    require(text != "", "path", str(path), "a file with some text")
    text, is_fasta = text.replace("\r\n", "\n"), file_format == "fasta"
    if is_fasta or (file_format == "auto" and path.suffix.lower() in FASTA):
        return _fasta(path, text.replace("\r", "\n").removesuffix("\n").split("\n"))
    lines = text.removesuffix("\n").split("\n")
    return [Record(str(number), line) for number, line in enumerate(lines, 1)]


def same_names(records: Sequence[Record]) -> str | None:
    """A sentence about records that share a name; None if none do."""
    counts = Counter(record.name for record in records)
    shared = [(name, count) for name, count in counts.most_common() if count > 1]
    if not shared:
        return None
    name, count = shared[0]
    others = f", and {len(shared) - 1:,} more" if len(shared) > 1 else ""
    return f"several records have the same name: {printable(name)[:80]!r} ({count:,} of them){others}"


def _fasta(path: Path, lines: list[str]) -> list[Record]:
    parts: list[tuple[str, list[str]]] = []
    for number, line in enumerate(lines, 1):
        if line.startswith(">"):
            words = line[1:].split()
            require(words != [], f"line {number} of {str(path)!r}", line, "a header with a name, as >chr1")
            parts.append((words[0], []))
        elif line.strip():
            at = f"line {number} of {str(path)!r}"
            require(parts != [], at, line[:40], "a header such as >chr1, to begin a FASTA file")
            parts[-1][1].append("".join(line.split()))
    require(parts != [], "path", str(path), "a FASTA file with at least one record")
    return [Record(name, "".join(pieces)) for name, pieces in parts]
