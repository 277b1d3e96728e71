"""Training on shards of token ids, in folders or buckets: windows are read when they are needed, many at a
time.

At a start the index is read, and no token: see `shard_index.py`. The order of rows is in `order.py`.

Shapes: B rows, L tokens of a row.
"""

import fnmatch
import glob
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hyena_jax.config import ShardsConfig
from hyena_jax.config.checks import MAX_COUNT
from hyena_jax.data.dataset import Batch, Dataset, rows_of
from hyena_jax.data.objects import Objects, split
from hyena_jax.data.order import Turns, drawn, places, turns
from hyena_jax.data.shard_index import BIN, DTYPES, ENCODING, INDEX, Index, Shard, digest_of, read_index
from hyena_jax.data.tokenizers import IdsTokenizer, Tokenizer, read_bpe, tokenizer_from_json
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import parse_json
from hyena_jax.system.storage.location import is_url

if TYPE_CHECKING:
    import grain

NAMED = re.compile(r"([A-Za-z0-9_-]+)=(.+)")
"""A source with a name, `web=PATH`."""


class Part(NamedTuple):
    """A shard where it lies."""

    objects: Objects
    file: str
    tokens: int
    dtype: np.dtype
    text_bytes: int | None
    """Of its text in UTF-8; None if unknown."""


class Parts:
    """Shards in a row, and the windows in them."""

    def __init__(self, parts: Sequence[Part], counts: Sequence[int]):
        """`counts` are the windows of each shard."""
        kept = [(part, count) for part, count in zip(parts, counts, strict=True) if count > 0]
        self.parts = [part for part, _ in kept]
        self.tokens = np.array([part.tokens for part in self.parts], np.int64)
        self.counts = np.array([count for _, count in kept], np.int64)
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def find(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shard of each window [B], and its number in the shard."""
        shards = np.searchsorted(self._ends, windows, "right")
        return shards, windows - (self._ends - self.counts)[shards]


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardSet(Dataset):
    """Shards to train on, by source, and shards to evaluate on.

    A shard of T tokens has floor((T - 1) / L) - 1 windows of L + 1 tokens, or one if it has no more. They lie
    side by side, so that the last token of one is the first of the next, and begin at another offset in each
    epoch. Evaluation reads windows side by side from the first token on, so that every token after it is
    predicted once.
    """

    kind: str = "tokens"
    tokenizer: Tokenizer
    train: tuple[Parts, ...]
    """Of each source."""
    held_out: Parts
    turns: Turns
    seq_len: int
    """L."""
    eos: int | None
    """The id after which another document begins, to keep documents apart; None does not."""
    vocab_size: int
    held_out_bytes: int | None
    """UTF-8 bytes of the held-out text, for losses per byte; None if unknown."""
    fingerprint: str
    """SHA-256 over the indices, the weights and L, in hexadecimal."""
    source: str
    n_readers: int = 8
    n_train_rows: None = field(default=None, init=False)

    @property
    def n_held_out_rows(self) -> int:
        """Windows side by side in each shard; its last one may be shorter."""
        return len(self.held_out)

    @property
    def n_held_out(self) -> int:
        """All held-out tokens but the first of each shard."""
        return int((self.held_out.tokens - 1).sum())

    @property
    def units_per_row(self) -> int:
        """L."""
        return self.seq_len

    def train_batches(
        self, batch_size: int, seed: int, part: int | Sequence[int] = 0, n_parts: int = 1
    ) -> "grain.MapDataset[Batch]":
        """As of all data."""
        import grain

        ours = rows_of(part, n_parts, batch_size)
        return grain.MapDataset.range(MAX_COUNT).map(lambda t: self.rows(seed, t * batch_size + ours))

    def train_rows(self, indices: np.ndarray) -> Batch:
        """The rows of seed 0 with these numbers."""
        return self.rows(0, indices)

    def rows(self, seed: int, rows: np.ndarray) -> Batch:
        """Rows [B] of a run, int32 [B, L]: `inputs`, `targets`, and `segment_ids` to keep documents apart."""
        at = places(seed, rows, [len(source) for source in self.train], self.turns)
        reads: list[Any] = [None] * len(rows)
        for i, source in enumerate(self.train):
            ours = np.flatnonzero(at.source == i)
            shards, numbers = source.find(at.window[ours])
            # Windows begin at most so far from the start that all fit, and less than L.
            most = np.minimum(
                source.tokens[shards] - 1 - source.counts[shards] * self.seq_len, self.seq_len - 1
            )
            offsets = np.array([drawn(seed, i, int(epoch))[-1] for epoch in at.epoch[ours]], np.uint64)
            starts = numbers * self.seq_len + (offsets % (most + 1).astype(np.uint64)).astype(np.int64)
            for row, shard, start in zip(ours, shards, starts, strict=True):
                reads[row] = source.parts[shard], int(start)
        return self._batch(self._read(reads))

    def held_out_rows(self, indices: np.ndarray) -> Batch:
        """The windows with these numbers; `weights` are 0 where a shard's last one is padded with token 0."""
        shards, numbers = self.held_out.find(indices)
        starts = numbers * self.seq_len
        reads = [
            (self.held_out.parts[shard], int(start)) for shard, start in zip(shards, starts, strict=True)
        ]
        inside = starts[:, None] + np.arange(1, self.seq_len + 1) < self.held_out.tokens[shards][:, None]
        return {**self._batch(self._read(reads)), "weights": inside.astype(np.float32)}

    def _read(self, reads: Sequence[tuple[Part, int]]) -> np.ndarray:
        """L + 1 tokens, int32 [B, L + 1], of each shard from a token on; 0 beyond its end. All reads are
        begun first.

        Raises:
          UserError: if a shard is shorter than it was, or holds an id beyond the vocabulary.
        """
        futures = []
        for part, start in reads:
            stop = min(start + self.seq_len + 1, part.tokens)
            size = part.dtype.itemsize
            futures.append(part.objects.begin(part.file, start * size, stop * size))
        tokens = np.zeros((len(reads), self.seq_len + 1), np.int32)
        for row, (part, _), future in zip(tokens, reads, futures, strict=True):
            found = np.frombuffer(part.objects.finish(part.file, future), part.dtype)
            row[: len(found)] = found
        # uint32 ids from 2**31 on are negative here.
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= self.vocab_size):
            i = int(np.argmax(((tokens < 0) | (tokens >= self.vocab_size)).any(1)))
            part, largest = reads[i][0], int(tokens[i].view(np.uint32).max())
            must = f"ids below the vocabulary's size {self.vocab_size}"
            require(False, f"{part.objects / part.file}", largest, must)
        return tokens

    def _batch(self, tokens: np.ndarray) -> Batch:
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        if self.eos is not None:
            ended = np.cumsum(tokens[:, :-1] == self.eos, axis=1, dtype=np.int32)
            batch["segment_ids"] = np.pad(ended[:, :-1], ((0, 0), (1, 0)))
        return batch

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """As of all tokens, and bits per byte if the bytes are known."""
        values = super().metrics(sums)
        if not values or not self.held_out_bytes:
            return values
        n_tokens = int(self.held_out.tokens.sum())
        bits = sums["nats"] / sums["count"] * n_tokens / self.held_out_bytes / math.log(2)
        return {"perplexity": values["perplexity"], "bits_per_byte": bits, **values}


class _Opened(NamedTuple):
    """What one path, folder or list of files holds."""

    objects: Objects
    train: list[Part]
    held_out: list[Part]
    index: Index | None
    digest: Any
    """JSON values that change with the tokens."""


def load_shards(config: ShardsConfig, tokenizer: Tokenizer | None = None) -> ShardSet:
    """The shards of `config`; `tokenizer` is the tokenizer of a run that is opened again, or None.

    Raises:
      UserError: if a source has no index and no shards, a shard is missing or has another size than the index
      says,
        sources do not fit together or the weights do not fit them, or a source is too short for one window.
    """
    must = "folders of shards, as `hyena-jax prepare` writes them, or .bin files"
    require(config.sources != (), "data.sources", (), must)
    sources = _opened("sources", config.sources, config)
    validation = _opened("validation_sources", config.validation_sources, config)
    every = [one for group in (sources, validation) for found in group.values() for one in found]
    tokenizer = _tokenizer_of(every, config, tokenizer)
    eos = _eos_of(every, config)
    if config.weights is not None and len(config.weights) != len(sources):
        must = f"{len(sources)} numbers, one for each source: {', '.join(sources)}"
        require(False, "weights", config.weights, must)
    length = config.seq_len

    def windows_to_train(part: Part) -> int:
        return 0 if part.tokens <= length else max(1, (part.tokens - 1) // length - 1)

    train = {name: [part for one in found for part in one.train] for name, found in sources.items()}
    if config.weights is None:  # every window of all sources once an epoch
        train = {", ".join(train): [part for parts in train.values() for part in parts]}
    pools = {name: Parts(parts, list(map(windows_to_train, parts))) for name, parts in train.items()}
    for name, pool in pools.items():
        longest = max((part.tokens for part in train[name]), default=0)
        found = (
            f"its longest shard has {longest:,} tokens, and seq_len={length} needs at least {length + 1:,}"
        )
        if len(pool) == 0:
            raise UserError(f"source {name!r} is too short: {found}", "sources")
    if validation:
        held = [part for found in validation.values() for one in found for part in one.train + one.held_out]
    else:
        held = [part for found in sources.values() for one in found for part in one.held_out]
    held_out = Parts(held, [-(-(part.tokens - 1) // length) for part in held])
    if len(held_out) == 0:
        raise UserError(
            "hold no tokens to evaluate on: give --data.validation-sources, or prepare them with a larger"
            " --held-out",
            "sources",
        )
    n_bytes = [part.text_bytes for part in held_out.parts]
    about = {"seq_len": length, "weights": config.weights, "tokenizer": digest_of(tokenizer)}
    for group, found in (("sources", sources), ("validation", validation)):
        about[group] = [[one.digest for one in source] for source in found.values()]
    n_shards, n_tokens = (
        sum(len(p.parts) for p in pools.values()),
        sum(int(p.tokens.sum()) for p in pools.values()),
    )
    return ShardSet(
        tokenizer=tokenizer,
        train=tuple(pools.values()),
        held_out=held_out,
        turns=turns(config.weights or (1,), "weights"),
        seq_len=length,
        eos=eos if config.documents else None,
        vocab_size=tokenizer.vocab_size,
        held_out_bytes=None if None in n_bytes else sum(n_bytes),
        fingerprint=hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest(),
        source=f"{n_tokens:,} tokens in {n_shards:,} shards of {', '.join(sources)}",
    )


def _opened(argument: str, entries: Sequence[str], config: ShardsConfig) -> dict[str, list[_Opened]]:
    """What each source holds, by its name: that before `=`, or its path."""
    found: dict[str, list[_Opened]] = {}
    for entry in entries:
        match = NAMED.fullmatch(entry)
        name, path = (match[1], match[2]) if match is not None else (entry, entry)
        paths = _matching(argument, path)
        of_files: dict[str, list[str]] = {}
        for one in paths:
            folder, last = split(one)
            if last.endswith(BIN):
                of_files.setdefault(folder, []).append(last)
            else:
                folder, last = (folder, last) if last.endswith(".json") else (one, INDEX)
                found.setdefault(name, []).append(_of_index(argument, folder, last, config))
        for folder, files in of_files.items():
            found.setdefault(name, []).append(_of_files(argument, folder, files, config))
    return found


def _matching(argument: str, path: str) -> list[str]:
    """The paths that one with wildcards stands for; itself, if it has none."""
    if not any(character in path for character in "*?["):
        return [path]
    if is_url(path):
        folder, _, _ = re.split(r"[*?[]", path, maxsplit=1)[0].rpartition("/")
        names = Objects(folder, argument).sizes()
        # In a bucket, as in a folder, a wildcard does not match a slash.
        urls = [f"{folder}/{name}" for name in names if f"{folder}/{name}".count("/") == path.count("/")]
        found = [url for url in urls if fnmatch.fnmatchcase(url, path)]
    else:
        found = glob.glob(path)
    require(found != [], argument, path, "a pattern that some .bin files, folders or index.json files match")
    return sorted(found)


def _of_index(argument: str, folder: str, name: str, config: ShardsConfig) -> _Opened:
    objects = Objects(folder, argument)
    data = objects.read(name)
    if data is None:
        raise UserError(
            f"{objects / name} does not exist: write it with hyena-jax prepare, or name .bin files, such as"
            f" {objects / '*.bin'}, with --data.dtype and --data.vocab-size",
            argument,
        )
    index = read_index(objects / name, data, argument)
    sizes = objects.sizes()
    train, held_out = (
        [_part(argument, objects, shard, index, sizes) for shard in shards]
        for shards in (index.shards, index.held_out)
    )
    return _Opened(objects, train, held_out, index, hashlib.sha256(data).hexdigest())


def _part(argument: str, objects: Objects, shard: Shard, index: Index, sizes: Mapping[str, int]) -> Part:
    """A shard that an index lists. Raises UserError unless it is there, in the size that the index says."""
    file, dtype = shard.name + BIN, DTYPES[index.dtype]
    if file not in sizes:
        raise UserError(f"{objects / file} is missing, but its index lists it", argument)
    size = shard.tokens * dtype.itemsize
    if sizes[file] != size:
        raise UserError(f"{objects / file} has {sizes[file]:,} bytes, but its index says {size:,}", argument)
    return Part(objects, file, shard.tokens, dtype, shard.text_bytes)


def _of_files(argument: str, folder: str, files: Sequence[str], config: ShardsConfig) -> _Opened:
    """`.bin` files of a folder: as its index describes them, or by their size."""
    objects = Objects(folder, argument)
    sizes = objects.sizes()
    data = objects.read(INDEX)
    if data is not None:
        index = read_index(objects / INDEX, data, argument)
        listed = {shard.name + BIN: shard for shard in index.shards + index.held_out}
        if set(files) <= set(listed):
            parts = [_part(argument, objects, listed[file], index, sizes) for file in files]
            held_out = {shard.name + BIN for shard in index.held_out}
            digest = [listed[file].sha256 for file in files]
            sides = ([part for part in parts if (part.file in held_out) == side] for side in (False, True))
            return _Opened(objects, *sides, index, [digest, index.dtype])
    must = f"uint16 or uint32, for .bin files without an index such as {objects / files[0]}"
    require(config.dtype is not None, "dtype", None, must)
    dtype, parts = DTYPES[config.dtype], []
    for file in files:
        if file not in sizes:
            raise UserError(f"{objects / file} does not exist", argument)
        fits = sizes[file] > 0 and sizes[file] % dtype.itemsize == 0
        must = f"{config.dtype} numbers, a multiple of {dtype.itemsize} bytes"
        require(fits, f"{argument} {objects / file}", f"{sizes[file]} bytes", must)
        parts.append(Part(objects, file, sizes[file] // dtype.itemsize, dtype, None))
    return _Opened(objects, parts, [], None, [[part.file, part.tokens] for part in parts] + [config.dtype])


def _tokenizer_of(every: Sequence[_Opened], config: ShardsConfig, tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer that wrote all sources: the given one, that beside an index, or that of the config."""
    indexed = [one for one in every if one.index is not None]
    for one in indexed:
        for name in ("dtype", "vocab_size"):
            ours, theirs = getattr(config, name), getattr(one.index, name)
            require(
                ours in (None, theirs), name, ours, f"{theirs!r}, as the index of {one.objects.where} says"
            )
    given = None if tokenizer is None or not indexed else digest_of(tokenizer)
    digests = {one.index.tokenizer_sha256: one.objects.where for one in indexed}
    if len(digests) > 1:
        (one, first), (other, second), *_ = digests.items()
        raise UserError(
            f"must be of one tokenizer, but the index of {first} is of {one[:12]} and that of {second} of"
            f" {other[:12]} (SHA-256)",
            "sources",
        )
    if given is not None and given not in digests:
        (digest, where), *_ = digests.items()
        raise UserError(
            f"must be of the run's tokenizer ({given[:12]}), but the index of {where} is of {digest[:12]}"
            " (SHA-256)",
            "sources",
        )
    if tokenizer is not None:
        return tokenizer
    if indexed:
        require(config.tokenizer_path is None, "tokenizer_path", config.tokenizer_path, "None with an index")
        objects = indexed[0].objects
        data = objects.read(ENCODING)
        if data is None:
            raise UserError(f"{objects / ENCODING} is missing: the tokenizer beside the index", "sources")
        found = tokenizer_from_json(parse_json(data))
        is_theirs = digest_of(found) in digests
        require(
            is_theirs,
            f"{objects / ENCODING}",
            digest_of(found)[:12],
            f"of SHA-256 {next(iter(digests))[:12]}",
        )
        return found
    if config.tokenizer_path is not None:
        return read_bpe(config.tokenizer_path)
    must = "given for .bin files without an index and without a tokenizer_path"
    require(config.vocab_size is not None, "vocab_size", None, must)
    return IdsTokenizer(config.vocab_size)


def _eos_of(every: Sequence[_Opened], config: ShardsConfig) -> int | None:
    """The id that ends documents in all sources; None if there is none."""
    known = {one.objects.where: one.index.eos for one in every if one.index is not None}
    for where, eos in known.items():
        require(config.eos in (None, eos), "eos", config.eos, f"{eos!r}, as the index of {where} says")
    found = {*known.values(), *([config.eos] if config.eos is not None or not known else [])}
    if not config.documents:
        return None
    if len(found) > 1:
        raise UserError(
            f"must end documents with one id to keep them apart, got {sorted(map(str, found))}", "sources"
        )
    must = "False, since no id ends documents: prepare the sources with --eos, or give --data.eos"
    require(found != {None}, "documents", True, must)
    return found.pop()
