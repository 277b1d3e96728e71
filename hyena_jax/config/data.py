"""What a data set is."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from hyena_jax.config.checks import Checked, require, require_at_least
from hyena_jax.config.models import RUNTIME
from hyena_jax.config.registry import Registry, register


@dataclass(frozen=True)
class DataConfig(Checked):
    """Base class of the configs of data.

    Register a subclass, a frozen dataclass, with a function that loads the data it describes:

        load(config, encoding) -> hyena_jax.data.Dataset

    `encoding` is None for a new run; else what the run in the folder reads its data with.
    """

    registry: ClassVar[Registry] = Registry("data", is_module=False)

    inputs: ClassVar[str] = "tokens"
    """What a model reads of the data: `tokens`, `images`, or another word that the model's config has too."""

    batch_size: int = field(default=16, kw_only=True)
    """Rows in a step, over all devices and all accumulated parts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "batch_size")


@dataclass(frozen=True)
class TextConfig(DataConfig):
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
    seq_len: int = 256
    """Tokens L in a training sequence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "seq_len")
        require(
            (self.tokenizer == "bpe") == (self.tokenizer_path is not None),
            "tokenizer_path",
            self.tokenizer_path,
            "given exactly when tokenizer is 'bpe'",
        )
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


def _check_validation_path(config: TextConfig | ImagesConfig) -> None:
    allowed = config.validation_path is None or config.path is not None
    require(allowed, "validation_path", config.validation_path, "given only together with path")


DATA_CONFIGS = DataConfig.registry
register("text", TextConfig, "hyena_jax.data.text:load_corpus")
register("images", ImagesConfig, "hyena_jax.data.images:load_image_set")
