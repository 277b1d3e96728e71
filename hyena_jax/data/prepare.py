"""Documents to shards of token ids, by several processes: the same bytes for any number of them.

A part of the input becomes at most two shards: to train on, and held out. Its description, part-00000.json,
is written last; parts that have one are left alone, so that the same call continues. plan.json says what is
written here, and index.json, see `shard_index.py`, that all of it is.
"""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyena_jax.config.files import with_digest, without_digest
from hyena_jax.data.documents import TFDS, Document, Span, parts_of, read_documents, spans_of
from hyena_jax.data.objects import Objects
from hyena_jax.data.shard_index import BIN, DTYPES, ENCODING, ENDS, INDEX, Index, Shard, digest_of, read_index
from hyena_jax.data.tokenizers import BytesTokenizer, Tokenizer
from hyena_jax.data.workers import Progress, share
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import parse_json, require_can_hold_files
from hyena_jax.system.storage.location import is_url
from hyena_jax.system.storage.mirror import opened

PLAN = "plan.json"
KEYS = ("shards", "held_out")
AT_ONCE = 2**20
"""Characters that are encoded together, at least."""


@dataclass(frozen=True)
class ShardPlan:
    """All that the bytes of the shards depend on."""

    tokenizer: Tokenizer
    eos: int | None
    """The id that ends every document."""
    held_out: float
    """The part of all documents that is held out."""
    field: str
    tfds_dir: str | None
    parts: tuple[tuple[Span, ...], ...]
    times: tuple[int, ...]
    """When the files of the input were changed last, in nanoseconds."""

    @property
    def dtype(self) -> str:
        """Of the ids."""
        return "uint16" if self.tokenizer.vocab_size <= 2**16 else "uint32"

    @property
    def size(self) -> int:
        """Bytes of the input."""
        return sum(map(size_of, self.parts))

    def to_json(self) -> dict[str, Any]:
        names = ("eos", "held_out", "field", "parts", "times")
        return {
            "tokenizer_sha256": digest_of(self.tokenizer),
            **{name: getattr(self, name) for name in names},
        }


def size_of(part: Sequence[Span]) -> int:
    """Bytes of a part of the input."""
    return sum(span.size for span in part)


def make_plan(
    inputs: Sequence[str],
    tokenizer: Tokenizer,
    eos: int | str | None = None,
    held_out: float = 0.001,
    field: str = "text",
    part_size: int = 2**27,
    tfds_dir: str | None = None,
    manual_dir: str | None = None,
) -> ShardPlan:
    """The parts of the inputs, and how they are encoded.

    Args:
      eos: the id that ends every document, or the text of its token; None: documents follow without a border.
      part_size: bytes of the input in a part, at least, unless a part is the last one.
    """
    if isinstance(eos, str):
        ids = tokenizer.encode(eos).tolist()
        must = f"an id below {tokenizer.vocab_size}, or the text of one token (this is {len(ids)}: {ids[:8]})"
        if isinstance(tokenizer, BytesTokenizer):
            must += "; bytes have no special tokens: take one that the text lacks, such as 0"
        require(len(ids) == 1, "eos", eos, must)
        (eos,) = ids
    size = tokenizer.vocab_size
    require(eos is None or 0 <= eos < size, "eos", eos, f"an id of the vocabulary, below {size}")
    require(0 <= held_out <= 0.5, "held_out", held_out, "in [0, 0.5]")
    parts = parts_of(spans_of(inputs, part_size, tfds_dir, manual_dir), part_size)
    require(parts != [], "INPUT", list(inputs), "files with some text")
    files = dict.fromkeys(span.path for part in parts for span in part if not span.path.startswith(TFDS))
    times = tuple(os.stat(file).st_mtime_ns for file in files)
    return ShardPlan(tokenizer, eos, held_out, field, tfds_dir, tuple(map(tuple, parts)), times)


def prepare(plan: ShardPlan, output: str, workers: int, progress: Progress) -> Index:
    """Writes the shards that are not there yet, and the index. All processes end with this one.

    `output` is a new folder or one of the same plan, or gs://BUCKET/NAME.
    """
    if not is_url(output):
        require_can_hold_files("output", opened(output, "output"))
    objects = Objects(output, "output")
    there = objects.sizes()
    text, must = json.dumps(plan.to_json()).encode(), "a new or empty folder, or one that this command began"
    require(PLAN in there or not there, "output", output, must)
    objects.write(PLAN, text, replace=False)  # another process may begin at this moment
    _require_same(output, objects.read(PLAN), text)
    objects.write(ENCODING, json.dumps(plan.tokenizer.to_json()).encode())
    todo = [i for i in range(len(plan.parts)) if _part_name(i) not in there]
    progress(sum(size_of(part) for i, part in enumerate(plan.parts) if _part_name(i) in there), 0)
    share(write_part, (plan, output), todo, workers, progress)
    names = list(map(_part_name, range(len(plan.parts))))
    found = zip(names, objects.read_all(names), strict=True)
    parts = [_read_part(objects / name, data) for name, data in found]
    shards = {key: tuple(part[key] for part in parts if part[key] is not None) for key in KEYS}
    tokenizer = plan.tokenizer
    index = Index(plan.dtype, tokenizer.vocab_size, plan.eos, digest_of(tokenizer), **shards)
    sizes, before = objects.sizes(), objects.read(INDEX)
    for shard in index.shards + index.held_out:
        n_bytes = shard.tokens * DTYPES[index.dtype].itemsize
        for suffix, size in ((BIN, n_bytes), (ENDS, shard.documents * 8)):
            found = sizes.get(shard.name + suffix, "no")
            if found != size:
                raise _damaged(objects, shard, suffix, f"has {found} bytes, but should have {size}")
    if before is not None and read_index(objects / INDEX, before, "output") != index:
        raise UserError(f"{objects / INDEX} differs from the part-*.json beside it: remove what was changed")
    objects.write(INDEX, index.to_json())
    return index


def _read_part(where: str, data: bytes) -> dict[str, Shard | None]:
    try:
        values = without_digest(parse_json(data))
        return {key: None if values[key] is None else Shard.read(values[key]) for key in KEYS}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where} is damaged: {error!s:.200}; remove it and prepare again") from error


def _part_name(number: int) -> str:
    return f"part-{number:05d}.json"


def _require_same(output: str, theirs: bytes | None, ours: bytes) -> None:
    if theirs == ours:
        return
    try:
        before, now = dict(parse_json(theirs or b"")), json.loads(ours)
        before.setdefault("times", now["times"])  # which the file has not always held
    except (ValueError, TypeError) as error:
        raise UserError(f"output {output!r} has a damaged {PLAN}: {error}; remove the folder") from error
    if before == now:
        return
    called = {"parts": "inputs or their sizes", "times": "the times at which inputs were changed"}
    names = [called.get(name, name) for name in now if before.get(name) != now[name]]
    raise UserError(
        f"output {output!r} holds shards of other settings: {', '.join(names)}; give a new folder"
    )


def write_part(plan: ShardPlan, output: str, number: int, progress: Progress) -> None:
    """Writes the shards of a part of the input, and last their description."""
    objects = Objects(output, "output")
    names = dict(zip(KEYS, (f"shard-{number:05d}", f"held-out-{number:05d}"), strict=True))
    drafts, last = {key: _Draft(plan) for key in names}, None
    for documents in _together(
        document
        for span in plan.parts[number]
        for document in read_documents(span, plan.field, plan.tfds_dir)
    ):
        texts = [document.text for document in documents]
        try:
            encoded = plan.tokenizer.encode_all(texts)
        except UserError:
            for document in documents:  # which of them
                try:
                    plan.tokenizer.encode(document.text)
                except UserError as error:
                    raise UserError(f"{document.place}: {error}") from error
            raise
        n_tokens = 0
        for document, ids in zip(documents, encoded, strict=True):
            key = "held_out" if _is_held_out(document.text, plan.held_out) else "shards"
            if last not in (None, key):  # pieces of one text are on both sides
                n_tokens += drafts[last].end()
            n_tokens += drafts[key].add(document, ids)
            last = None if document.is_end else key
        progress(sum(document.size for document in documents), n_tokens)
    found = {key: draft.write(objects, names[key]) for key, draft in drafts.items()}
    objects.write(_part_name(number), json.dumps(with_digest(found)).encode())


def _together(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents with text in groups that are worth a call of the tokenizer."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _is_held_out(text: str, share: float) -> bool:
    """Equal documents are on the same side, wherever they are."""
    number = int.from_bytes(
        hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little"
    )
    return number < share * 2**64


class _Draft:
    def __init__(self, plan: ShardPlan):
        self._plan, self._dtype = plan, DTYPES[plan.dtype]
        self._rows: list[np.ndarray] = []
        self._ends: list[int] = []
        self._n_tokens = self._n_bytes = 0

    def add(self, document: Document, ids: np.ndarray) -> int:
        """Adds a document or a piece of it; returns the number of tokens."""
        if document.text == "":
            return 0
        self._rows.append(ids.astype(self._dtype))
        self._n_tokens += len(ids)
        self._n_bytes += len(document.text.encode())
        return len(ids) + (self.end() if document.is_end else 0)

    def end(self) -> int:
        """Ends the document of the last piece; returns the number of tokens that this takes."""
        ids = [] if self._plan.eos is None else [self._plan.eos]
        self._rows.append(np.array(ids, self._dtype))
        self._n_tokens += len(ids)
        self._ends.append(self._n_tokens)
        return len(ids)

    def write(self, objects: Objects, name: str) -> dict[str, Any] | None:
        """Writes the shard, unless it is empty; returns its description."""
        if self._n_tokens == 0:
            return None
        tokens = np.concatenate(self._rows)
        data, ends = tokens.tobytes(), np.array(self._ends, "<u8").tobytes()
        objects.write(name + BIN, data)
        objects.write(name + ENDS, ends)
        digests = (hashlib.sha256(x).hexdigest() for x in (data, ends))
        shard = Shard(name, len(tokens), len(self._ends), self._n_bytes, int(tokens.max()), *digests)
        return dataclasses.asdict(shard)


def verify(output: str, workers: int, progress: Progress) -> Index:
    """Compares every shard with the index: size, SHA-256, largest id, and the ends of documents.

    UserError says which shard differs, and how.
    """
    objects = Objects(output, "output")
    data = objects.read(INDEX)
    if data is None:
        raise UserError(
            f"{objects / INDEX} does not exist: the command that wrote the shards has not ended", "output"
        )
    index = read_index(objects / INDEX, data, "output")
    shards = index.shards + index.held_out
    share(verify_shard, (index, output), range(len(shards)), workers, progress)
    return index


def _damaged(objects: Objects, shard: Shard, suffix: str, how: str) -> UserError:
    number = shard.name.rpartition("-")[2]
    again = f": remove part-{number}.json beside it and prepare again" if number.isdecimal() else ""
    return UserError(f"{objects / (shard.name + suffix)} {how}{again}")


def verify_shard(index: Index, output: str, number: int, progress: Progress) -> None:
    """Raises UserError unless a shard is as its index says."""
    objects = Objects(output, "output")
    shard = (index.shards + index.held_out)[number]
    dtype = DTYPES[index.dtype]
    for suffix, sha256 in ((BIN, shard.sha256), (ENDS, shard.ends_sha256)):
        data, what = objects.read(shard.name + suffix, sys.maxsize), objects / (shard.name + suffix)
        found = None if data is None else hashlib.sha256(data).hexdigest()
        if found != sha256:
            found = "is missing" if data is None else f"has the SHA-256 {found[:12]} and {len(data):,} bytes"
            raise _damaged(objects, shard, suffix, f"{found}, but its index says {sha256[:12]}")
        if suffix == BIN:
            tokens = np.frombuffer(data, dtype)
            agrees = (len(tokens), int(tokens.max())) == (shard.tokens, shard.largest)
        else:
            ends = np.frombuffer(data, "<u8")
            agrees = len(ends) == shard.documents and (np.diff(ends.astype(np.int64)) >= 0).all()
            agrees &= len(ends) == 0 or ends[-1] <= shard.tokens
        require(bool(agrees), what, "other numbers", "as its index says")
    progress(shard.tokens * dtype.itemsize, shard.tokens)
