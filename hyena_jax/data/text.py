"""Text as tokens: a file or folder, Python's own source code, or TensorFlow Datasets.

Shapes: n tokens to train on, m held-out tokens, L tokens of a row, B rows.
"""

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyena_jax.config import TextConfig
from hyena_jax.data.dataset import PROMPT_TOKENS, Batch, Dataset, with_bits_per_byte
from hyena_jax.data.tfds import ensure_prepared, open_builder, quiet
from hyena_jax.data.tokenizers import Tokenizer, build_tokenizer, encode_start
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import memory_size, read_bytes

HASHED_AT_ONCE = 2**24
"""Tokens that are read into memory at a time, if they are in a file."""
STDLIB_BYTES = 8_000_000
"""Size of `python_stdlib`; the whole library is some 12 MB."""
BYTE_ORDER_MARK = "\ufeff"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""How texts in UTF-16 begin, and none in UTF-8."""
MEMORY_PER_BYTE = 6
"""Least bytes of memory per byte of text: the text, its two parts, and its symbols as int32."""
STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders that are not the standard library, or hold its tests."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Corpus(Dataset):
    """One long stream of tokens to train on and one to evaluate on, read in windows of L + 1 tokens.

    Training reads a window at every offset; evaluation reads windows side by side, so that every token after
    the first is predicted once.
    """

    kind: str = "text"
    tokenizer: Tokenizer
    train: np.ndarray
    """[n], n > L, of any integer dtype; kept by reference."""
    held_out: np.ndarray
    """[m], m > L, dtype as `train`."""
    held_out_bytes: int | None = None
    """UTF-8 bytes of the held-out text, for losses per byte; None if unknown."""
    fingerprint: str
    """SHA-256 of the tokenizer and both token arrays."""
    source: str
    seq_len: int
    """L."""

    @property
    def n_train_rows(self) -> int:
        """Offsets at which a whole window begins."""
        return len(self.train) - self.seq_len

    @property
    def n_held_out_rows(self) -> int:
        """Windows side by side; the last may be shorter."""
        return -(-(len(self.held_out) - 1) // self.seq_len)

    def train_rows(self, indices: np.ndarray) -> Batch:
        """`inputs` and `targets`, int32 [B, L], of the windows at these offsets; targets are one token on."""
        windows = self.train[indices[:, None] + np.arange(self.seq_len + 1)].astype(np.int32)
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}

    def held_out_rows(self, indices: np.ndarray) -> Batch:
        """The windows with these numbers; `weights` are 0 where the last one is padded with token 0."""
        positions = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        inside = positions < len(self.held_out)
        read = self.held_out[np.minimum(positions, len(self.held_out) - 1)]
        read = np.where(inside, read, 0).astype(np.int32)
        return {"inputs": read[:, :-1], "targets": read[:, 1:], "weights": inside[:, 1:].astype(np.float32)}

    def prompt(self, text: str | None) -> np.ndarray:
        """As of all data; without a text, the start of the held-out text, however long a row is."""
        return self.held_out[:PROMPT_TOKENS] if text is None else super().prompt(text)

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, float]:
        n_tokens = len(self.held_out) - (self.tokenizer.bos is not None)  # those of the text
        return with_bits_per_byte(super().metrics(sums), sums, n_tokens, self.held_out_bytes)


def load_corpus(config: TextConfig, tokenizer: Tokenizer | None = None) -> Corpus:
    """The text of `config`, encoded with `tokenizer`, or with one built from the whole text if None.

    UserError if `tokenizer` lacks a symbol, or a part is shorter than `config.seq_len` + 1 tokens.
    """
    text = load_text(config)
    if tokenizer is None:
        tokenizer = build_tokenizer(config, text.train, text.held_out)
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    train = encode_start(tokenizer, text.train).astype(dtype)
    held_out = encode_start(tokenizer, text.held_out).astype(dtype)
    check_lengths("text", train, held_out, config.seq_len)
    return Corpus(
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        held_out_bytes=len(text.held_out.encode()),
        fingerprint=fingerprint(tokenizer, train, held_out),
        source=text.source,
        seq_len=config.seq_len,
    )


def check_lengths(kind: str, train: np.ndarray, held_out: np.ndarray, seq_len: int) -> None:
    """UserError unless both parts have at least seq_len + 1 tokens, enough for one row."""
    require(isinstance(seq_len, int) and seq_len > 0, "seq_len", seq_len, "an integer, at least 1")
    for part, tokens in (("training", train), ("held-out", held_out)):
        if len(tokens) <= seq_len:
            raise UserError(
                f"the {part} {kind} is too short: {len(tokens)} tokens,"
                f" and seq_len={seq_len} needs at least {seq_len + 1}"
            )


def fingerprint(tokenizer: Tokenizer, train: np.ndarray, held_out: np.ndarray) -> str:
    """SHA-256 of a tokenizer and both parts [n], [m], in hexadecimal."""
    # The length puts the border between the two parts into the digest.
    header = [tokenizer.to_json(), len(train)]
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for tokens in (train, held_out):
        for first in range(0, len(tokens), HASHED_AT_ONCE):
            some = tokens[first : first + HASHED_AT_ONCE]
            digest.update(some.astype(some.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def fingerprint_of_no_text(tokenizer: Tokenizer) -> str:
    """The fingerprint that a run has whose weights were converted, and whose text nobody knows."""
    none = np.zeros(0, np.uint8)
    return fingerprint(tokenizer, none, none)


class Text(NamedTuple):
    """A text to train on and a text to evaluate on."""

    train: str
    held_out: str
    source: str
    """Where it came from, for people."""


def load_text(config: TextConfig) -> Text:
    """Reads the text that `config` names."""
    if config.path is None:
        return _from_python_stdlib() if config.name == "python_stdlib" else _from_tfds(config)
    text = read_text("path", config.path)
    if config.validation_path is not None:
        held_out = read_text("validation_path", config.validation_path)
        return Text(text, held_out, f"{config.path}, held out: {config.validation_path}")
    # The cut that TensorFlow Datasets makes in tiny_shakespeare, so that both ways to it agree.
    cut = int(len(text) * 0.9)
    return Text(text[:cut], text[cut:], f"{config.path}, held out: its last 10%")


def read_text(argument: str, path: str) -> str:
    """The UTF-8 text of a file, or the concatenated texts of all files below a folder.

    Newlines are unchanged; a byte order mark at the start of a file is left out. Errors name `argument`.
    """
    root, texts = Path(path), []
    if root.suffix in (".npy", ".bin"):
        raise UserError(f"{argument} {path!r} is a file of tokens, not of text; add --data tokens")
    try:
        if not root.is_file() and not root.is_dir():
            raise UserError(f"must be an existing text file or folder, got {path!r}", argument)
        files = files_below(root) if root.is_dir() else [root]
        size = sum(file.stat().st_size for file in files)
        most = memory_size() // MEMORY_PER_BYTE
        larger = "larger ones are prepared once: hyena-jax prepare, then --data shards"
        must = f"at most {most} bytes, to fit this machine's memory ({larger})"
        require(size <= most, argument, path, must)
        for file in files:
            data = read_bytes(argument, file, most)
            texts.append(decoded(argument, data, repr(str(file))).removeprefix(BYTE_ORDER_MARK))
    except OSError as error:
        raise UserError(f"{path!r} cannot be read: {error}", argument) from error
    text = "".join(texts)
    require(text != "", argument, path, "a file or folder with some text")
    return text


def decoded(argument: str, data: bytes, place: str) -> str:
    """The text of UTF-8 bytes; UserError, which names `argument` and the place, for other bytes."""
    if data.startswith(UTF_16):
        whole = place.removesuffix(", byte 0")
        raise UserError(f"must hold UTF-8 text, but {whole} looks like UTF-16: convert it to UTF-8", argument)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {data[error.start]:#04x} at offset {error.start}"
        raise UserError(f"must hold UTF-8 text, but {place} has {byte}", argument) from error


def files_below(folder: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Regular files below `folder`, by relative path; none hidden, none in linked or `skipped` folders."""

    def refuse(error: OSError) -> None:
        raise error  # os.walk would skip a folder that it may not enter

    found = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(filter(Path.is_file, found), key=lambda path: path.relative_to(folder).as_posix())


def _from_python_stdlib() -> Text:
    """The library's files by path, up to `STDLIB_BYTES`, without separators.

    Every tenth file is held out, so that both parts are alike.
    """
    root, texts, size = Path(sysconfig.get_path("stdlib")), [], 0
    for file in files_below(root, STDLIB_SKIPPED):
        # The build writes _sysconfigdata: paths and flags of one machine.
        if file.suffix != ".py" or file.name.startswith("_sysconfigdata"):
            continue
        try:
            data = file.read_bytes()
            text = data.decode().removeprefix(BYTE_ORDER_MARK)
        except UnicodeDecodeError:
            continue
        size += len(data)
        if size > STDLIB_BYTES:
            break
        texts.append(text)
    if len(texts) < 10:
        raise UserError(
            f"name 'python_stdlib' needs Python's own source files, but {str(root)!r} has only {len(texts)}"
        )
    train = "".join(text for index, text in enumerate(texts) if index % 10 != 9)
    source = f"standard library of Python {platform.python_version()}, held out: every tenth file"
    return Text(train, "".join(texts[9::10]), source)


def _from_tfds(config: TextConfig) -> Text:
    """The train split; the validation and test splits, in that order, are held out."""
    import tensorflow_datasets as tfds

    with quiet():
        builder = open_builder(config.name, config.tfds_dir, bundled="python_stdlib")
        features = dict(builder.info.features)
        if len(features) != 1 or not all(isinstance(one, tfds.features.Text) for one in features.values()):
            found = ", ".join(f"{key} ({type(value).__name__})" for key, value in features.items())
            must = f"must be a data set with one feature, a Text, got {config.name!r} with: {found}"
            raise UserError(must, "name")
        ensure_prepared(builder, config.manual_dir, instead="any text with --data.path FILE")
        (feature,) = features
        splits = {
            split: "\n".join(example[feature].decode() for example in builder.as_data_source(split=split))
            for split in ("train", "validation", "test")
            if split in builder.info.splits
        }
    held_out = splits.get("validation", "") + splits.get("test", "")
    if not splits.get("train") or not held_out:
        found = ", ".join(builder.info.splits)
        raise UserError(f"name {config.name!r} must have train and validation or test splits, got {found}")
    return Text(splits["train"], held_out, f"{builder.info.full_name} of TensorFlow Datasets")
