"""The sources of shards that a config names: which shards there are, and whose tokenizer wrote them.

A source is a folder with an index (see `shard_index.py`), or `.bin` files, on the disk or in a bucket.
"""

import fnmatch
import glob
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hyena_jax.config import ShardsConfig
from hyena_jax.data.objects import Objects, split
from hyena_jax.data.shard_index import BIN, DTYPES, ENCODING, INDEX, Index, Shard, digest_of, read_index
from hyena_jax.data.tokenizers import IdsTokenizer, Tokenizer, read_bpe, tokenizer_from_json
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import parse_json
from hyena_jax.system.storage.location import is_url

NAMED = re.compile(r"([A-Za-z0-9_-]+)=(.+)")
"""A source with a name, `web=PATH`."""


class ShardPart(NamedTuple):
    """A shard where it lies."""

    objects: Objects
    file: str
    tokens: int
    dtype: np.dtype
    text_bytes: int | None
    """Of its text in UTF-8; None if unknown."""


class Source(NamedTuple):
    """What one path, folder or list of files holds."""

    objects: Objects
    train: list[ShardPart]
    held_out: list[ShardPart]
    index: Index | None
    digest: Any
    """JSON values that change with the tokens."""


def open_sources(argument: str, entries: Sequence[str], config: ShardsConfig) -> dict[str, list[Source]]:
    """What each source holds, by its name: that before `=`, or its path."""
    found: dict[str, list[Source]] = {}
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
                found.setdefault(name, []).append(_of_index(argument, folder, last))
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


def _of_index(argument: str, folder: str, name: str) -> Source:
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
    return Source(objects, train, held_out, index, hashlib.sha256(data).hexdigest())


def _part(argument: str, objects: Objects, shard: Shard, index: Index, sizes: Mapping[str, int]) -> ShardPart:
    """A shard that an index lists; UserError unless it is there, in the size that the index says."""
    file, dtype = shard.name + BIN, DTYPES[index.dtype]
    if file not in sizes:
        raise UserError(f"{objects / file} is missing, but its index lists it", argument)
    size = shard.tokens * dtype.itemsize
    if sizes[file] != size:
        raise UserError(f"{objects / file} has {sizes[file]:,} bytes, but its index says {size:,}", argument)
    return ShardPart(objects, file, shard.tokens, dtype, shard.text_bytes)


def _of_files(argument: str, folder: str, files: Sequence[str], config: ShardsConfig) -> Source:
    """`.bin` files of a folder: as its index describes them, or by their size."""
    objects = Objects(folder, argument)
    sizes = objects.sizes()
    data = objects.read(INDEX)
    if data is not None:
        index = read_index(objects / INDEX, data, argument)
        listed = {shard.name + BIN: shard for shard in index.shards + index.held_out}
        others = [file for file in files if file not in listed]
        if others and len(others) < len(files):  # by their size all would be trained on, held-out ones too
            beside = f"{objects / others[0]} lies beside an index that lists other files here, and not it"
            raise UserError(f"{beside}: name it without them, as a source NAME=PATH of its own", argument)
        if not others:
            parts = [_part(argument, objects, listed[file], index, sizes) for file in files]
            held_out = {shard.name + BIN for shard in index.held_out}
            digest = [listed[file].sha256 for file in files]
            sides = ([part for part in parts if (part.file in held_out) == side] for side in (False, True))
            return Source(objects, *sides, index, [digest, index.dtype])
    must = f"uint16 or uint32, for .bin files without an index such as {objects / files[0]}"
    require(config.dtype is not None, "dtype", None, must)
    dtype, parts = DTYPES[config.dtype], []
    for file in files:
        if file not in sizes:
            raise UserError(f"{objects / file} does not exist", argument)
        fits = sizes[file] > 0 and sizes[file] % dtype.itemsize == 0
        must = f"{config.dtype} numbers, a multiple of {dtype.itemsize} bytes"
        require(fits, f"{argument} {objects / file}", f"{sizes[file]} bytes", must)
        parts.append(ShardPart(objects, file, sizes[file] // dtype.itemsize, dtype, None))
    return Source(objects, parts, [], None, [[part.file, part.tokens] for part in parts] + [config.dtype])


def tokenizer_of(every: Sequence[Source], config: ShardsConfig, tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer that wrote all sources: the given one, that beside an index, or that of the config."""
    indexed = [one for one in every if one.index is not None]
    for one in indexed:
        for name in ("dtype", "vocab_size"):
            ours, theirs = getattr(config, name), getattr(one.index, name)
            must = f"{theirs!r}, as the index of {one.objects.where} says"
            require(ours in (None, theirs), name, ours, must)
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
        digest, must = digest_of(found), f"of SHA-256 {next(iter(digests))[:12]}"
        require(digest in digests, objects / ENCODING, digest[:12], must)
        return found
    if config.tokenizer_path is not None:
        return read_bpe(config.tokenizer_path)
    must = "given for .bin files without an index and without a tokenizer_path"
    require(config.vocab_size is not None, "vocab_size", None, must)
    return IdsTokenizer(config.vocab_size)


def eos_of(every: Sequence[Source], config: ShardsConfig, vocab_size: int) -> int | None:
    """The id that ends documents in all sources; None if there is none."""
    known = {one.objects.where: one.index.eos for one in every if one.index is not None}
    for where, eos in known.items():
        require(config.eos in (None, eos), "eos", config.eos, f"{eos!r}, as the index of {where} says")
    require((config.eos or 0) < vocab_size, "eos", config.eos, f"below the vocabulary's size {vocab_size}")
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
