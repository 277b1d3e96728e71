"""The documents of files to be tokenised: texts, JSON lines, Parquet, and data sets of TensorFlow Datasets.

An input is cut into spans, which processes can read by themselves; the cuts do not depend on their number.
"""

import gzip
import io
import itertools
import json
import mmap
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hyena_jax.data.text import BYTE_ORDER_MARK, decoded, files_below
from hyena_jax.data.tfds import ensure_prepared, open_builder, quiet
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import open_input

TFDS = "tfds:"
JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".json.gz", ".json.zst")
PARQUET = ".parquet"
PIECE = 2**16
"""Bytes of a long text that are encoded at a time."""
SEARCHED = 2**20
"""Bytes after a place in which a better one to cut a text is looked for."""
MAX_DOCUMENT = 2**29
"""Bytes of a line of JSON: a small file that was compressed may hold any number."""
TFDS_SPAN = 2**14
"""Examples of a span of TensorFlow Datasets, whose sizes are not known."""


class Span(NamedTuple):
    """A part of an input."""

    path: str
    start: int
    stop: int
    """Bytes of a text or of JSON lines; all bytes of a compressed file; numbers of row groups or examples."""
    size: int
    """Bytes of the input, of TensorFlow Datasets examples, for the progress that is shown."""


class Document(NamedTuple):
    """A document, or a piece of a long text."""

    text: str
    is_end: bool
    place: str
    """For errors."""
    size: int
    """As of `Span`, since the last document."""


def spans_of(
    inputs: Sequence[str], span_size: int, tfds_dir: str | None, manual_dir: str | None
) -> list[Span]:
    """The spans of all inputs in their order, each of about `span_size` bytes where it can be cut.

    A folder is all files below it, ordered by path. `tfds:NAME:SPLIT` is a split of TensorFlow Datasets, by
    default `train`; it is downloaded and prepared if it is not there yet.
    """
    spans = []
    for given in inputs:
        if given.startswith(TFDS):
            spans += _tfds_spans(given, tfds_dir, manual_dir)
            continue
        path = Path(given)
        require(path.exists(), "INPUT", given, f"a file, a folder, or {TFDS}NAME")
        files = files_below(path) if path.is_dir() else [path]
        require(files != [], "INPUT", given, "a folder with some files")
        for file in files:
            spans += _file_spans(str(file), span_size)
    return spans


def parts_of(spans: Sequence[Span], part_size: int) -> list[list[Span]]:
    """Neighbouring spans together; each part has at least `part_size` bytes, but for the last one."""
    parts, size = [], part_size
    for span in spans:
        if size >= part_size:
            parts.append([])
            size = 0
        parts[-1].append(span)
        size += span.size
    return parts


def read_documents(span: Span, field: str, tfds_dir: str | None) -> Iterator[Document]:
    """The documents of a span, without empty ones; a text is one document, in the pieces of `_cut`.

    `field` is the key of a document's text, in JSON, of a column of Parquet, or of a feature. UserError says
    where text is not UTF-8 or a document has no such field.
    """
    if span.path.startswith(TFDS):
        yield from _of_tfds(span, field, tfds_dir)
    elif span.path.endswith(PARQUET):
        yield from _of_parquet(span, field)
    elif span.path.endswith(JSON_LINES):
        yield from _of_json_lines(span, field)
    else:
        yield from _of_text(span)


def _file_spans(path: str, span_size: int) -> list[Span]:
    if path.endswith((".bin", ".npy")):
        raise UserError(f"{path!r} is a file of tokens, not of text; train on it with --data shards", "INPUT")
    with open_input("INPUT", path) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return []
        if path.endswith(PARQUET):
            groups = _parquet(path).metadata
            sizes = [groups.row_group(i).total_byte_size for i in range(groups.num_row_groups)]
            return [Span(path, i, i + 1, size) for i, size in enumerate(sizes)]
        is_lines = path.endswith(JSON_LINES)
        if path.endswith((".gz", ".zst", ".bz2", ".xz", ".zip")):
            must = f"a text, {PARQUET}, or one of {', '.join(JSON_LINES)}"
            require(is_lines, "INPUT", path, must)
            return [Span(path, 0, size, size)]
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cut = _next_line if is_lines else _cut
            ends = [0]
            while ends[-1] < size:
                ends.append(cut(data, min(ends[-1] + span_size, size)))
    return [Span(path, start, stop, stop - start) for start, stop in itertools.pairwise(ends)]


def _cut(data: mmap.mmap, at: int) -> int:
    """Where to cut a text at `at` or soon after.

    After a newline between two printable ASCII characters, where the usual tokenizers begin a new piece, so
    that the text is encoded as if it had not been cut; else after any newline; else before a character.
    """
    last = min(at + SEARCHED, len(data))
    for pattern in (rb"(?<=[!-~])\n(?=[!-~])", rb"\n"):
        if found := re.compile(pattern).search(data, max(at - 1, 0), last):
            return found.end()
    while at < len(data) and data[at] & 0xC0 == 0x80:  # within a character
        at += 1
    return at


def _next_line(data: mmap.mmap, at: int) -> int:
    """The start of the first line at `at` or after it."""
    found = data.find(b"\n", at - 1)
    return len(data) if found < 0 else found + 1


def _of_text(span: Span) -> Iterator[Document]:
    with open_input("INPUT", span.path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        require(span.stop <= len(data), "INPUT", span.path, "a file that does not change")
        at = span.start
        while at < span.stop:
            stop = min(_cut(data, at + PIECE), span.stop)
            text = decoded("INPUT", data[at:stop], f"{span.path}, byte {at:,}")
            text = text.removeprefix(BYTE_ORDER_MARK) if at == 0 else text
            is_end = stop == len(data)
            if text or is_end:
                yield Document(text, is_end, f"{span.path}, byte {at:,}", stop - at)
            at = stop


def _of_json_lines(span: Span, field: str) -> Iterator[Document]:
    with open_input("INPUT", span.path) as file:
        file.seek(span.start)
        at = read = span.start
        is_compressed = span.path.endswith((".gz", ".zst"))
        try:
            source = file
            if span.path.endswith(".gz"):
                source = gzip.GzipFile(fileobj=file)
            elif span.path.endswith(".zst"):
                import pyarrow

                source = io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), 2**20)
            for line in iter(lambda: source.readline(MAX_DOCUMENT + 1), b""):
                place = f"{span.path}, {'uncompressed ' if is_compressed else ''}byte {at:,}"
                must = f"a line of at most {MAX_DOCUMENT:,} bytes"
                require(len(line) <= MAX_DOCUMENT, place, "a longer one", must)
                at += len(line)
                now = file.tell() if is_compressed else at
                if line.strip():
                    try:
                        values = json.loads(decoded("INPUT", line, place))
                    except (ValueError, RecursionError) as error:
                        if isinstance(error, UserError):
                            raise
                        raise UserError(f"{place}: not JSON: {error}", "INPUT") from error
                    yield Document(_text_of(values, field, place), True, place, now - read)
                    read = now
                if not is_compressed and at >= span.stop:
                    return
        except (EOFError, OSError, zlib.error) as error:
            raise UserError(f"{span.path!r} cannot be read: {error}", "INPUT") from error


def _of_parquet(span: Span, field: str) -> Iterator[Document]:
    import pyarrow

    file = _parquet(span.path)
    names = file.schema_arrow.names
    require(names.count(field) == 1, "field", field, f"one column of {span.path}: {', '.join(names)}")
    for group in range(span.start, span.stop):
        try:
            texts = file.read_row_group(group, columns=[field]).column(field).to_pylist()
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"group {group} of {span.path!r} cannot be read: {error}", "INPUT") from error
        for row, text in enumerate(texts):
            place = f"{span.path}, row {row:,} of group {group}"
            size = span.size if row == len(texts) - 1 else 0
            yield Document(_text_of({field: text}, field, place), True, place, size)


def _parquet(path: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path!r} is not a Parquet file: {error}", "INPUT") from error


def _tfds_spans(given: str, tfds_dir: str | None, manual_dir: str | None) -> list[Span]:
    name, _, split = given.removeprefix(TFDS).partition(":")
    with quiet():
        builder = open_builder(name, tfds_dir, bundled="the name of one")
        ensure_prepared(builder, manual_dir, instead="files")
        splits = builder.info.splits
        split = split or "train"
        require(split in splits, "INPUT", given, f"{TFDS}{name}:SPLIT with one of {', '.join(splits)}")
        count = splits[split].num_examples
    firsts = range(0, count, TFDS_SPAN)
    stops = [min(first + TFDS_SPAN, count) for first in firsts]
    size = splits[split].num_bytes
    sizes = [size * stop // count - size * first // count for first, stop in zip(firsts, stops, strict=True)]
    path = f"{TFDS}{name}:{split}"
    return [Span(path, *values) for values in zip(firsts, stops, sizes, strict=True)]


def _of_tfds(span: Span, field: str, tfds_dir: str | None) -> Iterator[Document]:
    name, _, split = span.path.removeprefix(TFDS).partition(":")
    with quiet():
        examples = open_builder(name, tfds_dir, bundled="the name of one").as_data_source(split=split)
        for i in range(span.start, span.stop):
            place = f"{span.path}, example {i:,}"
            example = examples[i]
            require(field in example, "field", field, f"a feature of {place}: {', '.join(example)}")
            text = example[field]
            text = decoded("INPUT", text, place) if isinstance(text, bytes) else text
            size = span.size if i == span.stop - 1 else 0
            yield Document(_text_of({field: text}, field, place), True, place, size)


def _text_of(values: Any, field: str, place: str) -> str:
    is_object = isinstance(values, dict) and field in values
    keys = f"an object with {', '.join(values)}" if isinstance(values, dict) else type(values).__name__
    require(is_object, "field", field, f"a key of every document, but {place} is {keys}")
    text = values[field]
    require(isinstance(text, str), "field", field, f"a text, but in {place} it is {type(text).__name__}")
    return text
