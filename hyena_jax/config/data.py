"""What a data set is."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from hyena_jax.config.checks import Checked, require, require_at_least, require_at_most
from hyena_jax.config.inputs import InputKind, input_kind
from hyena_jax.config.models import MOST_SYMBOLS, RUNTIME
from hyena_jax.config.registry import Registry, register


@dataclass(frozen=True)
class DataConfig(Checked):
    """Base class of the configs of data.

    Register a subclass, a frozen dataclass, with a function that loads the data it describes:

        load(config, encoding) -> hyena_jax.data.dataset.Dataset

    which `hyena_jax.data.sources` makes of arrays, of any rows, or of an iterator with a state.
    `encoding` is None for a new run; else what the run in the folder reads its data with.
    """

    registry: ClassVar[Registry] = Registry("data", is_module=False)

    inputs: ClassVar[str] = "tokens"
    """What a model reads of the data: `tokens`, `images`, or another word that the model's config has too."""

    batch_size: int = field(default=16, kw_only=True)
    """Rows in a step, over all devices and all accumulated parts."""

    @property
    def input_kind(self) -> InputKind:
        """What follows from `inputs`."""
        return input_kind(self.inputs)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "batch_size")


@dataclass(frozen=True)
class StreamConfig(DataConfig):
    """Base of the configs of one long stream of tokens, which is read in windows."""

    seq_len: int = field(default=256, kw_only=True)
    """Tokens L in a training sequence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "seq_len")


@dataclass(frozen=True)
class TextConfig(StreamConfig):
    """Which text, as which tokens, in which batches."""

    name: str = "python_stdlib"
    """`python_stdlib` (no download) or the name of a text data set of TensorFlow Datasets."""
    path: str | None = field(default=None, metadata=RUNTIME)
    """Text file or folder to use in place of `name`; the last 10% are held out."""
    validation_path: str | None = field(default=None, metadata=RUNTIME)
    """Text file or folder to hold out in place of the last 10% of `path`."""
    tfds_dir: str | None = field(default=None, metadata=RUNTIME)
    """Where TensorFlow Datasets keeps prepared data (its data_dir)."""
    manual_dir: str | None = field(default=None, metadata=RUNTIME)
    """Folder with an already downloaded source file (the data set's manual_dir)."""
    tokenizer: Literal["bytes", "characters", "graphemes", "bpe"] = "bytes"
    """Symbols: UTF-8 bytes, code points, grapheme clusters, or the pieces of `tokenizer_path`."""
    tokenizer_path: str | None = field(default=None, metadata=RUNTIME)
    """The `tokenizer.json` of a byte-pair tokenizer (tokenizer=bpe)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            (self.tokenizer == "bpe") == (self.tokenizer_path is not None),
            "tokenizer_path",
            self.tokenizer_path,
            "given exactly when tokenizer is 'bpe'",
        )
        _check_validation_path(self)


@dataclass(frozen=True)
class TokensConfig(StreamConfig):
    """Which files of token ids, in which batches."""

    path: str | None = field(default=None, metadata=RUNTIME)
    """File of tokens, memory-mapped: `.npy` (integers of one dimension) or `.bin` (`dtype`, little endian, no
    header); the last 10% are held out."""
    validation_path: str | None = field(default=None, metadata=RUNTIME)
    """Such a file to hold out in place of the last 10% of `path`."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Of the ids in a `.bin` file."""
    vocab_size: int | None = None
    """Symbols; None takes the largest id in the files plus one, or the tokenizer's count."""
    tokenizer_path: str | None = field(default=None, metadata=RUNTIME)
    """The `tokenizer.json` of the byte-pair tokenizer that wrote the ids; None shows ids as numbers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_most(MOST_SYMBOLS, self, "vocab_size")
        require_at_least(2, self, "vocab_size")
        is_told_once = self.vocab_size is None or self.tokenizer_path is None
        require(is_told_once, "vocab_size", self.vocab_size, "None with tokenizer_path, which tells it")
        _check_validation_path(self)


@dataclass(frozen=True)
class ImagesConfig(DataConfig):
    """Which labelled images, in which batches."""

    inputs: ClassVar[str] = "images"

    name: Literal["digits", "mnist", "cifar10"] = "digits"
    """`digits` (8 x 8, bundled with scikit-learn, no download), or a data set of TensorFlow Datasets."""
    path: str | None = field(default=None, metadata=RUNTIME)
    """Folder with one pair of IDX files to use in place of `name`; the last 10% are held out."""
    validation_path: str | None = field(default=None, metadata=RUNTIME)
    """Folder with one pair of IDX files to hold out in place of the last 10% of `path`."""
    tfds_dir: str | None = field(default=None, metadata=RUNTIME)
    """Where TensorFlow Datasets keeps prepared data (its data_dir)."""
    manual_dir: str | None = field(default=None, metadata=RUNTIME)
    """Folder with already downloaded source files (the data set's manual_dir)."""
    batch_size: int = field(default=32, kw_only=True)
    """Images in a step, over all devices and all accumulated parts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_validation_path(self)


def _check_validation_path(config: TextConfig | TokensConfig | ImagesConfig) -> None:
    allowed = config.validation_path is None or config.path is not None
    require(allowed, "validation_path", config.validation_path, "given only together with path")


DATA_CONFIGS = DataConfig.registry
register("text", TextConfig, "hyena_jax.data.text:load_corpus")
register("tokens", TokensConfig, "hyena_jax.data.token_files:load_tokens")
register("images", ImagesConfig, "hyena_jax.data.images:load_image_set")
