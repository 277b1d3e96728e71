"""Configs of data sets, and the kinds of inputs that models read."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, NamedTuple

from hyena_jax.config.checks import RUNTIME, AtLeast, AtMost, Checked
from hyena_jax.config.registry import Registry, register
from hyena_jax.system.errors import require

# Larger vocabularies cannot be computed.
MAX_SYMBOLS = 2**24


class InputKind(NamedTuple):
    """The properties of an input kind, which the field `inputs` of a model's and its data's config names."""

    unit: str
    """The unit that is predicted and counted, unless the data name another."""
    is_tokens: bool
    """Inputs are token ids [L]: their length can be sharded, prompts continued, and perplexity reported."""
    is_images: bool
    """Inputs are float32 images [height, width, channels], drawn with their predictions after training."""


KINDS = {"tokens": InputKind("token", True, False), "images": InputKind("image", False, True)}


def input_kind(inputs: str) -> InputKind:
    """The kind of `tokens` or `images`; any other word is a kind of the user's, with neither property."""
    return KINDS.get(inputs, InputKind("row", False, False))


@dataclass(frozen=True)
class DataConfig(Checked):
    """Base class of the configs of data.

    Register a subclass, a frozen dataclass, with a function that loads the data it describes:

        load(config, encoding) -> hyena_jax.data.dataset.Dataset

    which `hyena_jax.data.own` makes from arrays, any rows, or an iterator with a state.
    `encoding` is None for a new run, else the encoding that is saved in the run folder.
    """

    registry: ClassVar[Registry] = Registry("data", is_module=False)

    inputs: ClassVar[str] = "tokens"
    """What a model reads: `tokens`, `images`, or another word; must equal the model config's `inputs`."""

    batch_size: Annotated[int, AtLeast(1)] = field(default=16, kw_only=True)
    """Rows per step, over all devices and accumulation steps."""

    @property
    def input_kind(self) -> InputKind:
        return input_kind(self.inputs)


@dataclass(frozen=True)
class StreamConfig(DataConfig):
    """Base class of the configs of one long stream of tokens, read in windows."""

    seq_len: Annotated[int, AtLeast(1)] = field(default=256, kw_only=True)
    """Tokens L per training sequence."""


@dataclass(frozen=True)
class TextConfig(StreamConfig):
    """Text, its tokenizer and its batches."""

    name: str = "python_stdlib"
    """`python_stdlib` (no download) or the name of a text data set of TensorFlow Datasets."""
    path: str | None = field(default=None, metadata=RUNTIME)
    """Text file or folder to use instead of `name`; the last 10% are held out."""
    validation_path: str | None = field(default=None, metadata=RUNTIME)
    """Text file or folder to hold out instead of the last 10% of `path`."""
    tfds_dir: str | None = field(default=None, metadata=RUNTIME)
    """Where TensorFlow Datasets keeps prepared data (its data_dir)."""
    manual_dir: str | None = field(default=None, metadata=RUNTIME)
    """Folder with a source file that you downloaded (the data set's manual_dir)."""
    tokenizer: Literal["bytes", "characters", "graphemes", "bpe", "sentencepiece", "dna"] = "bytes"
    """Tokens: UTF-8 bytes, code points, grapheme clusters, the pieces of `tokenizer_path`, or DNA's bases."""
    tokenizer_path: str | None = field(default=None, metadata=RUNTIME)
    """The `tokenizer.json` of a byte-pair tokenizer (tokenizer=bpe), or a SentencePiece `.model`
    (tokenizer=sentencepiece)."""
    bos: Annotated[int | None, AtLeast(0)] = None
    """Id before the first token of a text, of a tokenizer with a `tokenizer_path`; None adds none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        has_file = self.tokenizer in ("bpe", "sentencepiece")
        require(
            has_file == (self.tokenizer_path is not None),
            "tokenizer_path",
            self.tokenizer_path,
            "given exactly when tokenizer is 'bpe' or 'sentencepiece'; 'bytes' needs no file",
        )
        require(has_file or self.bos is None, "bos", self.bos, "None without tokenizer_path")
        _check_validation_path(self)


@dataclass(frozen=True)
class TokensConfig(StreamConfig):
    """Files of token ids and their batches."""

    path: str | None = field(default=None, metadata=RUNTIME)
    """File of tokens, memory-mapped: `.npy` (a one-dimensional integer array) or `.bin` (`dtype`, little
    endian, no header); the last 10% are held out."""
    validation_path: str | None = field(default=None, metadata=RUNTIME)
    """File of tokens to hold out instead of the last 10% of `path`."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Dtype of the ids in a `.bin` file."""
    vocab_size: Annotated[int | None, AtLeast(2), AtMost(MAX_SYMBOLS)] = None
    """Vocabulary size; None takes the tokenizer's, or the largest id in the files plus one."""
    tokenizer_path: str | None = field(default=None, metadata=RUNTIME)
    """The `tokenizer.json` of the byte-pair tokenizer that wrote the ids; None shows ids as numbers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_told_once = self.vocab_size is None or self.tokenizer_path is None
        require(is_told_once, "vocab_size", self.vocab_size, "None with tokenizer_path, which sets it")
        _check_validation_path(self)


@dataclass(frozen=True)
class ShardsConfig(StreamConfig):
    """Shards of token ids, of any size and number, in folders or buckets; read as they are needed."""

    sources: tuple[str, ...] = field(default=(), metadata=RUNTIME)
    """What `hyena-jax prepare` wrote: folders or `index.json` files; or `.bin` files. Wildcards are allowed,
    and gs://BUCKET/NAME. `NAME=` before a path names its source; paths of one name are one source."""
    weights: tuple[float, ...] | None = None
    """The share of each source in the rows; None reads every window of all sources once an epoch."""
    validation_sources: tuple[str, ...] = field(default=(), metadata=RUNTIME)
    """Sources to hold out; without any, what `prepare` held out of `sources`."""
    documents: bool = False
    """Keep documents apart, which end with the id `eos`, in mixers that can."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Dtype of the ids in `.bin` files without an `index.json`, little endian, no header."""
    vocab_size: Annotated[int | None, AtLeast(2), AtMost(MAX_SYMBOLS)] = None
    """Vocabulary size of `.bin` files without an `index.json`; None takes the tokenizer's."""
    eos: Annotated[int | None, AtLeast(0)] = None
    """Id that ends a document, in `.bin` files without an `index.json`."""
    tokenizer_path: str | None = field(default=None, metadata=RUNTIME)
    """The `tokenizer.json` of the byte-pair tokenizer that wrote `.bin` files without an `index.json`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_told_once = self.vocab_size is None or self.tokenizer_path is None
        require(is_told_once, "vocab_size", self.vocab_size, "None with tokenizer_path, which sets it")
        require(self.weights != (), "weights", (), "a weight for each source, or None")


@dataclass(frozen=True)
class ImagesConfig(DataConfig):
    """Labelled images and their batches."""

    inputs: ClassVar[str] = "images"

    name: Literal["digits", "mnist", "cifar10"] = "digits"
    """`digits` (8 x 8, bundled with scikit-learn, no download), or a data set of TensorFlow Datasets."""
    path: str | None = field(default=None, metadata=RUNTIME)
    """Folder with one pair of IDX files to use instead of `name`; the last 10% are held out."""
    validation_path: str | None = field(default=None, metadata=RUNTIME)
    """Folder with one pair of IDX files to hold out instead of the last 10% of `path`."""
    tfds_dir: str | None = field(default=None, metadata=RUNTIME)
    """Where TensorFlow Datasets keeps prepared data (its data_dir)."""
    manual_dir: str | None = field(default=None, metadata=RUNTIME)
    """Folder with source files that you downloaded (the data set's manual_dir)."""
    batch_size: int = field(default=32, kw_only=True)
    """Images per step, over all devices and accumulation steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_validation_path(self)


def _check_validation_path(config: TextConfig | TokensConfig | ImagesConfig) -> None:
    for name in ("path", "validation_path"):  # an empty variable of a shell would name the current folder
        require(getattr(config, name) != "", name, "", "the path of a file or folder, or None")
    allowed = config.validation_path is None or config.path is not None
    require(allowed, "validation_path", config.validation_path, "given only together with path")


DATA_CONFIGS = DataConfig.registry
register("text", TextConfig, "hyena_jax.data.text:load_corpus")
register("tokens", TokensConfig, "hyena_jax.data.tokens:load_tokens")
register("shards", ShardsConfig, "hyena_jax.data.shards:load_shards")
register("images", ImagesConfig, "hyena_jax.data.images:load_image_set")
