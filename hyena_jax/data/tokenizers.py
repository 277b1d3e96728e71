"""Text to symbols and back: bytes, characters, grapheme clusters, bases, or a trained tokenizer's pieces.

Shapes: n symbols. Every tokenizer is a frozen value that `to_json` writes and `tokenizer_from_json` reads, so
that a run folder contains its tokenizer.
"""

import base64
import binascii
import codecs
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from hyena_jax.config import TextConfig
from hyena_jax.config.models import MAX_SYMBOLS
from hyena_jax.system.errors import UserError, choose, require
from hyena_jax.system.files import MAX_JSON, parse_json, read_bytes

if TYPE_CHECKING:
    import tokenizers

MAX_GROWTH = 1024
REPLACEMENT = "\ufffd"
"""Stands for bytes that are not (or not yet) UTF-8."""


StreamDecoder = Callable[..., str]
"""decode(ids, final=False) returns the text that is certain, and keeps the rest of the ids for the next call;
`final` also returns what was kept."""


class Tokenizer:
    """Base class of the tokenizers. By default no id begins a text, and every id is certain at once."""

    kind: ClassVar[str]
    """The tokenizer's name, in `TextConfig.tokenizer` and in data.json."""
    vocab_size: int
    """Number of ids: they are in [0, vocab_size)."""
    bos: int | None = None
    """The id before the first of every text that a model reads from its start; None if there is none.

    `encode` leaves it out, since a text may be a part of another; `encode_start` adds it.
    """

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text`, int32 [n]; UserError if a symbol is outside the vocabulary."""
        raise NotImplementedError

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, which may be faster together."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The inverse of `encode`, without any `bos`; UserError if an id is outside [0, vocab_size)."""
        raise NotImplementedError

    def stream(self) -> StreamDecoder:
        """A new decoder for live printing; its outputs joined are `decode` of all the ids."""
        return lambda ids, final=False: self.decode(ids)

    def to_json(self) -> dict[str, Any]:
        """JSON values from which `tokenizer_from_json` makes an equal tokenizer: its kind and its fields."""
        names = [field.name for field in fields(self)] if is_dataclass(self) else []
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"kind": self.kind} | {k: list(x) if isinstance(x, tuple) else x for k, x in values.items()}


@dataclass(frozen=True)
class BytesTokenizer(Tokenizer):
    """The 256 byte values of UTF-8."""

    kind: ClassVar[str] = "bytes"
    vocab_size: ClassVar[int] = 256

    def encode(self, text: str) -> np.ndarray:
        """Returns UTF-8 bytes, int32 [n]; a lone surrogate has none and raises UserError."""
        _require_utf8(text, self.kind)
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the bytes; U+FFFD stands for bytes that are not UTF-8."""
        return _checked(ids, self.vocab_size).astype(np.uint8).tobytes().decode(errors="replace")

    def stream(self) -> StreamDecoder:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def decode(ids: Sequence[int], final: bool = False) -> str:
            return decoder.decode(_checked(ids, self.vocab_size).astype(np.uint8).tobytes(), final)

        return decode


class _SymbolsTokenizer(Tokenizer):
    """What tokenizers share whose ids are places in a list of symbols."""

    symbols: Sequence[str]

    @property
    def vocab_size(self) -> int:
        return len(self.symbols)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(self.symbols.__getitem__, _checked(ids, self.vocab_size)))


@dataclass(frozen=True)
class CharactersTokenizer(_SymbolsTokenizer):
    """The code points of a corpus, in ascending order."""

    kind: ClassVar[str] = "characters"
    symbols: str

    def __post_init__(self) -> None:
        fits = isinstance(self.symbols, str) and list(self.symbols) == sorted(set(self.symbols))
        require(fits, "symbols", str(self.symbols)[:80], "code points in ascending order, each once")

    @cached_property
    def _code_points(self) -> np.ndarray:
        return _code_points(self.symbols)

    def encode(self, text: str) -> np.ndarray:
        """Returns one id for each code point, int32 [n]; UserError if one is not in the vocabulary."""
        points = _code_points(text)
        ids = np.searchsorted(self._code_points, points)
        known = np.isin(points, self._code_points)
        if not known.all():
            _refuse(map(chr, points[~known]), self.kind)
        return ids.astype(np.int32)


@dataclass(frozen=True)
class GraphemesTokenizer(_SymbolsTokenizer):
    """The extended grapheme clusters of a corpus (what a reader calls a character), in ascending order.

    Decoded clusters may fuse: `encode(decode(ids))` can differ from ids, `decode(encode(text))` is text.
    """

    kind: ClassVar[str] = "graphemes"
    symbols: tuple[str, ...]

    def __post_init__(self) -> None:
        fits = all(isinstance(symbol, str) for symbol in self.symbols)
        fits = fits and len(set(self.symbols)) == len(self.symbols)
        require(fits, "symbols", str(self.symbols)[:80], "grapheme clusters, each once")

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {symbol: index for index, symbol in enumerate(self.symbols)}

    def encode(self, text: str) -> np.ndarray:
        """Returns one id for each cluster, int32 [n]; UserError if one is not in the vocabulary."""
        clusters = _graphemes(text)
        unknown = [cluster for cluster in clusters if cluster not in self._ids]
        if unknown:
            _refuse(unknown, self.kind)
        return np.fromiter(map(self._ids.__getitem__, clusters), np.int32, len(clusters))


@dataclass(frozen=True)
class BpeTokenizer(Tokenizer):
    """The pieces of a byte-pair tokenizer; `definition` is the text of its Hugging Face `tokenizer.json`.

    No special tokens are added and none but `bos` is dropped in decoding. Byte-level tokenizers round-trip
    every text; others may normalize it.
    """

    kind: ClassVar[str] = "bpe"
    definition: str = field(repr=False)
    bos: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_model", _parse_tokenizer(self.definition))
        require(len(self._vocabulary) > 0, "vocabulary", {}, "at least one piece")
        require(self.vocab_size <= MAX_SYMBOLS, "largest id", self.vocab_size - 1, f"below {MAX_SYMBOLS}")
        _check_bos(self)

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return self._model.get_vocab(with_added_tokens=True)

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one, since a vocabulary may have gaps."""
        return 1 + max(self._vocabulary.values())

    def encode(self, text: str) -> np.ndarray:
        """Returns the pieces of `text`, int32 [n]; UserError if the tokenizer has none for a symbol.

        The text is encoded as a whole: line by line, some tokenizers would give other pieces.
        """
        _require_utf8(text, self.kind)
        with _faults_refused():
            unknown = [s for s in dict.fromkeys(text) if not s.isspace() and self._lacks(s)]
            if unknown:
                _refuse(unknown, self.kind)
            return np.array(self._model.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text; by as many threads as TOKENIZERS_PARALLELISM and RAYON_NUM_THREADS allow."""
        if not self._has_all_bytes:
            return super().encode_all(texts)
        for text in texts:
            _require_utf8(text, self.kind)
        with _faults_refused():
            found = self._model.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(encoding.ids, np.int32) for encoding in found]

    @cached_property
    def _has_all_bytes(self) -> bool:
        """Whether every text is a sequence of pieces: they are made of bytes, and each byte is a piece."""
        from tokenizers.pre_tokenizers import ByteLevel

        rules = parse_json(self.definition).get("pre_tokenizer")
        rules = rules.get("pretokenizers", [rules]) if isinstance(rules, dict) else []
        last = rules[-1].get("type") if rules and isinstance(rules[-1], dict) else None
        return last == "ByteLevel" and all(symbol in self._vocabulary for symbol in ByteLevel.alphabet())

    def _lacks(self, symbol: str) -> bool:
        """Whether no piece covers a symbol: the library would drop it silently or give its unknown piece."""
        pieces = self._model.encode(symbol, add_special_tokens=False).tokens
        return not pieces or self._model.model.unk_token in pieces

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the pieces; U+FFFD stands for bytes that are not UTF-8."""
        ids = [i for i in _checked(ids, self.vocab_size).tolist() if i != self.bos]
        with _faults_refused():
            return self._model.decode(ids, skip_special_tokens=False)

    def stream(self) -> StreamDecoder:
        return _PieceStream(self.decode)


@dataclass(frozen=True)
class SentencePieceTokenizer(Tokenizer):
    """The pieces of a SentencePiece model; `definition` is the content of its `.model` file.

    No special pieces are added. Models may normalize a text; those with byte fallback encode every symbol.
    """

    kind: ClassVar[str] = "sentencepiece"
    definition: bytes = field(repr=False)
    bos: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_model", _parse_sentencepiece(self.definition))
        most = f"in 1..{MAX_SYMBOLS}"
        require(1 <= self.vocab_size <= MAX_SYMBOLS, "pieces", self.vocab_size, most)
        _check_bos(self)

    @cached_property
    def vocab_size(self) -> int:
        return self._model.vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """Returns the pieces of `text`, int32 [n]; UserError if the model has none for a symbol."""
        _require_utf8(text, self.kind)
        ids = np.array(self._model.encode(text), np.int32)
        if self._model.unk_id() in ids:
            unknown = [s for s in dict.fromkeys(text) if self._model.unk_id() in self._model.encode(s)]
            _refuse(unknown or [text[:20]], self.kind)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the pieces, without control pieces; U+FFFD stands for bytes not in UTF-8."""
        return self._model.decode(_checked(ids, self.vocab_size).tolist())

    def stream(self) -> StreamDecoder:
        return _PieceStream(self.decode)

    def to_json(self) -> dict[str, Any]:
        """As of all tokenizers, with the file in base64."""
        return super().to_json() | {"definition": base64.b64encode(self.definition).decode()}


DNA_SYMBOLS = ("[CLS]", "[SEP]", "[BOS]", "[MASK]", "[PAD]", "[RESERVED]", "[UNK]", *"ACGTN")
DNA_IDS = np.array(
    [
        DNA_SYMBOLS.index(letter if letter in DNA_SYMBOLS else "[UNK]")
        for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    ],
    np.int32,
)
"""By the letter, from A to Z."""


@dataclass(frozen=True)
class DnaTokenizer(_SymbolsTokenizer):
    """The bases of DNA with the fixed ids of HyenaDNA: seven special tokens, then A, C, G, T, N.

    Lower case, which marks repeats in genomes, reads as upper case; other letters, such as the codes of
    ambiguous bases, are [UNK]. Decoding gives the names of special tokens.
    """

    kind: ClassVar[str] = "dna"
    symbols: ClassVar[Sequence[str]] = DNA_SYMBOLS

    def encode(self, text: str) -> np.ndarray:
        """Returns an id for each letter, int32 [n]; UserError for what is not a letter, such as a newline."""
        points = _code_points(text)
        points = np.where((points >= ord("a")) & (points <= ord("z")), points - 32, points)  # to upper case
        letters = (points >= ord("A")) & (points <= ord("Z"))
        if not letters.all():
            _refuse(map(chr, points[~letters]), self.kind)
        return DNA_IDS[points - ord("A")]


class _PieceStream:
    """Decodes new pieces after the last printed ones, since decoders treat a first piece differently.

    What may be the start of a character at the end is held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._n_before = 0  # how many of the ids are printed
        self._n_printed = 0  # characters of their text

    def __call__(self, ids: Sequence[int], final: bool = False) -> str:
        self._ids.extend(ids)
        text = self._decode(self._ids)
        end = len(text) if final else len(text.rstrip(REPLACEMENT))
        new = text[self._n_printed : end]
        self._n_printed = max(self._n_printed, end)
        if new and end == len(text):
            self._ids = self._ids[self._n_before :]
            self._n_before = len(self._ids)
            self._n_printed = len(self._decode(self._ids))
        return new


@dataclass(frozen=True)
class IdsTokenizer(Tokenizer):
    """Ids as their own text: decimal numbers separated by spaces."""

    kind: ClassVar[str] = "ids"
    vocab_size: int

    def __post_init__(self) -> None:
        fits = 2 <= self.vocab_size <= MAX_SYMBOLS
        require(fits, "vocab_size", self.vocab_size, f"in 2..{MAX_SYMBOLS}")

    def encode(self, text: str) -> np.ndarray:
        """Returns the numbers in the text, int32 [n]; UserError if a word is not an id of the vocabulary."""
        words = text.split()
        wrong = [word for word in words if not (word.isascii() and word.isdecimal())]
        if wrong:
            raise UserError(
                f"must be token ids such as '1 2 3', got {', '.join(map(repr, wrong[:5]))}", "text"
            )
        words = [word.lstrip("0") or "0" for word in words]
        longest = max(words, key=len, default="")
        fits = len(longest) <= len(str(MAX_SYMBOLS))  # or NumPy, or Python, cannot hold it
        require(fits, "a token id", longest[:40], f"in 0..{self.vocab_size - 1}")
        return _checked([int(word) for word in words], self.vocab_size).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, _checked(ids, self.vocab_size)))

    def stream(self) -> StreamDecoder:
        is_first = True

        def decode(ids: Sequence[int], final: bool = False) -> str:
            nonlocal is_first
            text = self.decode(ids)
            if not text:
                return ""
            text, is_first = text if is_first else f" {text}", False
            return text

        return decode


def is_tokenizer(encoding: Any) -> bool:
    """Whether an encoding is a tokenizer, so that a model's output can be decoded to text."""
    return all(hasattr(encoding, name) for name in ("encode", "decode", "stream", "vocab_size"))


def encode_start(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The ids [n] of a text that a model reads from its start: with the tokenizer's `bos`, if it has one."""
    ids, bos = tokenizer.encode(text), getattr(tokenizer, "bos", None)
    return ids if bos is None else np.concatenate([np.array([bos], ids.dtype), ids])


def decode_after(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add to that of `prompt`: some decoders treat the first piece of a text differently.

    The ids of a prompt may end within a character, which then belongs to the continuation.
    """
    if isinstance(tokenizer, IdsTokenizer):  # which separates all but the first by a space
        return tokenizer.decode(ids)
    decode = tokenizer.stream()
    decode(prompt)
    return decode(ids, final=True)


def build_tokenizer(config: TextConfig, *texts: str) -> Tokenizer:
    """The tokenizer that `config.tokenizer` names; its vocabulary covers all `texts`."""
    if config.tokenizer == "bytes":
        return BytesTokenizer()
    if config.tokenizer == "characters":
        return CharactersTokenizer("".join(sorted(set().union(*texts))))
    if config.tokenizer == "graphemes":
        return GraphemesTokenizer(tuple(sorted(set().union(*map(_graphemes, texts)))))
    if config.tokenizer == "dna":
        return DnaTokenizer()
    if config.tokenizer == "sentencepiece":
        return read_sentencepiece(config.tokenizer_path, config.bos)
    return read_bpe(config.tokenizer_path, config.bos)


def read_bpe(path: str, bos: int | None = None) -> BpeTokenizer:
    """The byte-pair tokenizer of a `tokenizer.json`. Raises UserError if it cannot be used."""
    return _read(path, lambda data: BpeTokenizer(data.decode(), bos))


def read_sentencepiece(path: str, bos: int | None = None) -> SentencePieceTokenizer:
    """The tokenizer of a SentencePiece `.model`. Raises UserError if it cannot be used."""
    return _read(path, lambda data: SentencePieceTokenizer(data, bos))


def _read(path: str, make: Callable[[bytes], Tokenizer]) -> Tokenizer:
    data = read_bytes("tokenizer_path", path, MAX_JSON)
    try:
        return make(data)
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"tokenizer_path {path!r} cannot be used: {error}") from error


def tokenizer_from_json(values: dict[str, Any]) -> Tokenizer:
    """The inverse of `Tokenizer.to_json`; UserError for values that no tokenizer wrote."""
    readers = {
        "bytes": lambda: BytesTokenizer(),
        "characters": lambda: CharactersTokenizer(values["symbols"]),
        "graphemes": lambda: GraphemesTokenizer(tuple(values["symbols"])),
        "bpe": lambda: BpeTokenizer(values["definition"], values.get("bos")),
        "sentencepiece": lambda: SentencePieceTokenizer(
            base64.b64decode(values["definition"], validate=True), values.get("bos")
        ),
        "dna": lambda: DnaTokenizer(),
        "ids": lambda: IdsTokenizer(operator.index(values["vocab_size"])),
    }
    try:
        return choose("tokenizer", values["kind"], readers)()
    except (KeyError, TypeError, binascii.Error) as error:
        raise UserError(
            f"must be what to_json returns, got {str(values)[:80]}: {error!r}", "tokenizer"
        ) from error


def require_ours(tokenizer: Tokenizer) -> None:
    """Raises UserError for a class of the user's own: a run keeps a tokenizer by its kind and fields."""
    name, must = type(tokenizer).__name__, "one of hyena_jax.data.tokenizers, not of a class of your own"
    require(type(tokenizer).__module__ == __name__, "the tokenizer of your data", name, must)


def as_kept(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer as read from a run folder; UserError for a class of the user's own."""
    require_ours(tokenizer)
    return tokenizer_from_json(tokenizer.to_json())


def _code_points(text: str) -> np.ndarray:
    """Code points, uint32 [n]; lone surrogates pass, so that a vocabulary can name them in its error."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _graphemes(text: str) -> list[str]:
    import regex

    return regex.findall(r"\X", text)


def _parse_tokenizer(definition: str) -> "tokenizers.Tokenizer":
    import tokenizers

    values = parse_json(definition)
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        growth = _growth(values.get(name)) if isinstance(values, dict) else 1
        require(growth <= MAX_GROWTH, f"growth of a text by the {name}", growth, f"at most {MAX_GROWTH}")
    with _faults_refused():
        model = tokenizers.Tokenizer.from_str(definition)
    if not isinstance(model.model, tokenizers.models.BPE):
        raise UserError(f"not a byte-pair tokenizer but {type(model.model).__name__}")
    # A file can contain the length limits of its model, which would truncate a corpus.
    model.no_truncation()
    model.no_padding()
    return model


def _parse_sentencepiece(definition: bytes) -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise UserError(
            "a SentencePiece model needs the package sentencepiece: pip install 'hyena_jax[interop]'"
        ) from None
    model = sentencepiece.SentencePieceProcessor()
    try:
        with silent_stderr():
            model.LoadFromSerializedProto(definition)
            model.encode("a")
    except (RuntimeError, OSError, TypeError, ValueError) as error:
        raise UserError(f"not a working SentencePiece model: {error}") from error
    return model


def _check_bos(tokenizer: BpeTokenizer | SentencePieceTokenizer) -> None:
    bos, most = tokenizer.bos, f"None or an id below vocab_size={tokenizer.vocab_size}"
    is_id = type(bos) is int and 0 <= bos < tokenizer.vocab_size
    require(bos is None or is_id, "bos", bos, most)


def _growth(rules: Any) -> int:
    """The largest factor by which a tokenizer's rules can lengthen a text, one applied after the other."""
    if isinstance(rules, list):
        return math.prod(map(_growth, rules))
    if not isinstance(rules, dict):
        return 1
    own = 1
    if rules.get("type") == "ByteLevel":
        own = 2
    elif rules.get("type") == "Replace":
        own = max(1, len(str(rules.get("content"))))
        own += rules.get("pattern") in ({"String": ""}, {"Regex": ""})
    return own * math.prod(map(_growth, rules.values()))


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Discards what is written to file descriptor 2: C++ and Rust bypass `sys.stderr`."""
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed: nothing can be written
        yield
        return
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


@contextmanager
def _faults_refused() -> Iterator[None]:
    """Turns errors of the tokenizers library into UserErrors.

    On rules that it does not expect, the library panics: it prints a message and raises a BaseException.
    """
    try:
        with silent_stderr():
            yield
    except UserError:
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not is_panic and not isinstance(error, Exception):  # an interrupt
            raise
        raise UserError(f"not a working Hugging Face tokenizer.json: {error}") from error


def _require_utf8(text: str, kind: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        _refuse((symbol for symbol in text if "\ud800" <= symbol <= "\udfff"), kind)


def _checked(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    array = np.asarray(ids, np.int64)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise UserError(f"must be in [0, {vocab_size}), got {outside[0]}", "ids")
    return array


def _refuse(symbols: Iterable[str], kind: str) -> NoReturn:
    first = ", ".join(repr(symbol) for symbol in list(dict.fromkeys(symbols))[:5])
    raise UserError(f"must hold only symbols of the {kind} vocabulary, got {first}", "text")
