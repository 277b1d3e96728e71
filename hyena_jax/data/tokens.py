"""Token ids in files, `.npy` or `.bin` (without a header): memory-mapped, never loaded as a whole.

Shapes: n tokens.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyena_jax.config import TokensConfig
from hyena_jax.config.models import MAX_SYMBOLS
from hyena_jax.data.shard_index import BIN, DTYPES, INDEX, Shard, read_index
from hyena_jax.data.text import HASHED_AT_ONCE, Corpus, check_lengths, fingerprint
from hyena_jax.data.tokenizers import IdsTokenizer, Tokenizer, read_bpe
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import MAX_JSON, open_input, read_bytes


def load_tokens(config: TokensConfig, tokenizer: Tokenizer | None = None) -> Corpus:
    """The tokens of `config`; `tokenizer` is the tokenizer of a run that is opened again, or None.

    Beside an index that lists the files they are not read at a start: the index says their largest ids and
    digests.
    """
    require(config.path is not None, "data.path", None, "a .npy or .bin file of tokens")
    train, source = _mapped("path", config.path, config.dtype), f"{config.path}"
    listed = [_listed(config.path, train)]
    if config.validation_path is None:
        cut = int(len(train) * 0.9)
        train, held_out, source = train[:cut], train[cut:], f"{source}, held out: its last 10%"
    else:
        held_out = _mapped("validation_path", config.validation_path, config.dtype)
        listed.append(_listed(config.validation_path, held_out))
        source = f"{source}, held out: {config.validation_path}"
    known = None if None in listed else listed
    if tokenizer is None and config.tokenizer_path is not None:
        tokenizer = read_bpe(config.tokenizer_path)
    elif tokenizer is None and config.vocab_size is not None:
        tokenizer = IdsTokenizer(config.vocab_size)
    return token_corpus(train, held_out, config.seq_len, tokenizer, source, known)


def token_corpus(
    train: np.ndarray,
    held_out: np.ndarray,
    seq_len: int,
    tokenizer: Tokenizer | None,
    source: str,
    known: Sequence[Shard] | None = None,
) -> Corpus:
    """Tokens to train on [n] and to evaluate on [m] as a data set; neither is copied.

    Args:
      tokenizer: None shows ids as numbers, in the least vocabulary that holds all of them.
      known: the shards that the tokens are, as an index describes them; None reads all tokens.
    """
    if known is not None:
        largest = max(shard.largest for shard in known)
    else:
        largest = max(_largest_id("tokens to train on", train), _largest_id("held-out tokens", held_out))
    require(largest < MAX_SYMBOLS, "tokens", largest, f"ids below {MAX_SYMBOLS}")
    tokenizer = IdsTokenizer(max(2, largest + 1)) if tokenizer is None else tokenizer
    size = tokenizer.vocab_size
    require(largest < size, "tokens", largest, f"ids below the vocabulary's size {size}")
    check_lengths("stream of tokens", train, held_out, seq_len)
    if known is None:
        digest = fingerprint(tokenizer, train, held_out)
    else:  # with the tokens' digests in their place
        about = [tokenizer.to_json(), len(train), *(shard.sha256 for shard in known)]
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return Corpus(
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        fingerprint=digest,
        source=source,
        seq_len=seq_len,
        kind="tokens",
    )


def _mapped(argument: str, path: str, dtype: str) -> np.ndarray:
    """The tokens [n] of a file, memory-mapped."""
    file, where = Path(path), f"{argument} {path!r}"
    is_several = file.is_dir() or any(character in path for character in "*?[")
    must = "a .npy or .bin file of tokens"
    must += "; --data shards reads several .bin files, and what hyena-jax prepare wrote" if is_several else ""
    require(file.suffix in (".npy", ".bin") and not is_several, argument, path, must)
    with open_input(argument, file) as opened:
        size = os.fstat(opened.fileno()).st_size
        if file.suffix == ".bin":
            item = np.dtype(dtype).itemsize
            fits = size > 0 and size % item == 0
            require(fits, where, f"{size} bytes", f"{dtype} numbers, a multiple of {item} bytes")
            return np.memmap(opened, np.dtype(dtype).newbyteorder("<"), "r")
    try:
        with np.errstate(over="raise"):  # of sizes that no file has
            tokens = np.lib.format.open_memmap(file, mode="r")
    except Exception as error:  # the header is a Python literal, which fails in many ways
        raise UserError(f"{where} must be a .npy file of numbers: {error!r:.200}") from error
    declared = tokens.offset + tokens.nbytes
    require(declared == size, where, f"{size} bytes", f"{declared} bytes long, as its header says")
    return as_tokens(where, tokens)


def _listed(path: str, tokens: np.ndarray) -> Shard | None:
    """The shard that a `.bin` file is, if an index beside it lists it in its size. It must have its dtype."""
    file = Path(path)
    if file.suffix != BIN or not (file.parent / INDEX).is_file():
        return None
    index = read_index(str(file.parent / INDEX), read_bytes("path", file.parent / INDEX, MAX_JSON), "path")
    for shard in index.shards + index.held_out:
        if shard.name == file.stem and shard.tokens * DTYPES[index.dtype].itemsize == tokens.nbytes:
            is_same = DTYPES[index.dtype] == tokens.dtype
            require(is_same, "dtype", tokens.dtype.name, f"{index.dtype}, as the index beside {path} says")
            return shard
    return None


def as_tokens(argument: str, tokens: Any) -> np.ndarray:
    """`tokens` as an array [n]; UserError unless it is one-dimensional, of integers, and not empty."""
    tokens = tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens)
    found = described(tokens)
    is_stream = tokens.ndim == 1 and tokens.dtype.kind in "iu"
    require(is_stream, argument, found, "a one-dimensional array of integer token ids")
    require(len(tokens) > 0, argument, found, "not empty")
    return tokens


def described(x: np.ndarray) -> str:
    """The dtype and shape of an array, for errors."""
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"


def _largest_id(argument: str, tokens: np.ndarray) -> int:
    """The largest of tokens [n], reading a part at a time; UserError if one is negative."""
    least, largest = 0, 0
    for first in range(0, len(tokens), HASHED_AT_ONCE):
        some = tokens[first : first + HASHED_AT_ONCE]
        least, largest = min(least, int(some.min())), max(largest, int(some.max()))
    require(least >= 0, argument, least, "ids, at least 0")
    return largest
