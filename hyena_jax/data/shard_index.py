"""The index of a folder of shards: what `hyena-jax prepare` wrote, so that nobody has to read it to know.

A shard NAME is two files: NAME.bin, the ids of its tokens without a header, and NAME.ends, the uint64 numbers
of tokens before the end of each document. Both are little endian. Beside them lie index.json, and
encoding.json with the tokenizer.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyena_jax.config.models import MAX_SYMBOLS
from hyena_jax.data.tokenizers import Tokenizer
from hyena_jax.system.errors import UserError, is_unicode, require
from hyena_jax.system.files import parse_json

INDEX, ENCODING = "index.json", "encoding.json"
BIN, ENDS = ".bin", ".ends"
VERSION = 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Shard:
    """What is known about a shard."""

    name: str
    tokens: int
    documents: int
    """Those that end in it."""
    text_bytes: int
    """Of its text in UTF-8."""
    largest: int
    """The largest id."""
    sha256: str
    """Of NAME.bin, in hexadecimal."""
    ends_sha256: str

    @classmethod
    def read(cls, values: Any) -> "Shard":
        """The shard that JSON values describe; KeyError, TypeError or ValueError if they do not."""
        kinds = {"name": str, "sha256": str, "ends_sha256": str}
        found = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        for name, value in found.items():
            if type(value) is not kinds.get(name, int) or (name not in kinds and value < 0):
                raise ValueError(f"{name} is {value!r:.80}")
        is_name = found["name"] and "/" not in found["name"] and is_unicode(found["name"])
        if not is_name or found["tokens"] == 0:
            raise ValueError(f"name is {found['name']!r:.80}, tokens is {found['tokens']}")
        return cls(**found)


@dataclass(frozen=True)
class Index:
    """What is known about the shards of a folder."""

    dtype: str
    vocab_size: int
    eos: int | None
    """The id that ends every document."""
    tokenizer_sha256: str
    """See `digest_of`."""
    shards: tuple[Shard, ...]
    held_out: tuple[Shard, ...]

    def to_json(self) -> bytes:
        """The file's content, a shard a line."""
        lines = {name: getattr(self, name) for name in ("dtype", "vocab_size", "eos", "tokenizer_sha256")}
        texts = [
            f"{json.dumps(name)}: {json.dumps(value)}"
            for name, value in {"version": VERSION, **lines}.items()
        ]
        for name in ("shards", "held_out"):
            rows = (json.dumps(dataclasses.asdict(shard)) for shard in getattr(self, name))
            texts.append(f"{json.dumps(name)}: [\n" + ",\n".join(rows) + "\n]")
        return ("{\n" + ",\n".join(texts) + "\n}\n").encode()


def read_index(where: str, data: bytes, argument: str) -> Index:
    """The index in a file's content; errors name `argument` and `where`."""
    try:
        values = parse_json(data)
        version = values["version"]
        require(version == VERSION, "version", version, str(VERSION))
        parts = {name: tuple(map(Shard.read, values[name])) for name in ("shards", "held_out")}
        names = ("dtype", "vocab_size", "eos", "tokenizer_sha256")
        index = Index(**{name: values[name] for name in names}, **parts)
        require(index.dtype in DTYPES, "dtype", index.dtype, f"one of {', '.join(DTYPES)}")
        is_size = type(index.vocab_size) is int and 1 <= index.vocab_size <= MAX_SYMBOLS
        require(is_size, "vocab_size", index.vocab_size, f"in 1..{MAX_SYMBOLS}")
        is_id = type(index.eos) is int and 0 <= index.eos < index.vocab_size
        require(index.eos is None or is_id, "eos", index.eos, "None, or an id of the vocabulary")
        is_text = isinstance(index.tokenizer_sha256, str)
        require(is_text, "tokenizer_sha256", index.tokenizer_sha256, "a SHA-256 in hexadecimal")
        largest = max((shard.largest for shard in index.shards + index.held_out), default=0)
        must = f"below the vocabulary's size {index.vocab_size}"
        require(largest < index.vocab_size, "the largest id", largest, must)
        return index
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{where} is not an index of shards: {reason:.200}", argument) from error


def digest_of(tokenizer: Tokenizer | Mapping[str, Any]) -> str:
    """SHA-256 of a tokenizer, or of its JSON values, in hexadecimal."""
    values = tokenizer.to_json() if isinstance(tokenizer, Tokenizer) else tokenizer
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
