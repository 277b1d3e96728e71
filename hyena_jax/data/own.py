"""Your own data: turns arrays, rows or an iterator into the `Dataset` that a registered `load` returns.

    @dataclass(frozen=True)
    class Mine(DataConfig):
        seq_len: int = 64

    def load(config, encoding):
        return own.from_tokens(np.load("tokens.npy", mmap_mode="r"), config.seq_len)

    hyena_jax.register("mine", Mine, load)

Three functions: `from_tokens` (one long stream of tokens, read in windows as text is), `from_images` (images
with labels) and `from_rows` (rows.py: anything else, optionally with a weight for each target). Or write a
subclass of `Dataset` (dataset.py), which reads the rows with given indices.

Shapes: n rows, L length, B batch.
"""

import numpy as np

from hyena_jax.data.images import ImageSet, Labelled, Normalization, image_set
from hyena_jax.data.rows import Rows, from_rows
from hyena_jax.data.text import Corpus
from hyena_jax.data.tokenizers import Tokenizer, as_kept
from hyena_jax.data.tokens import as_tokens, described, token_corpus
from hyena_jax.system.errors import require

__all__ = ["from_images", "from_rows", "from_tokens"]


def from_tokens(
    tokens: np.ndarray,
    seq_len: int,
    held_out: np.ndarray | None = None,
    tokenizer: Tokenizer | None = None,
    source: str = "an array of tokens",
) -> Corpus:
    """One long stream of tokens as a data set, read in windows at every offset as text is.

    Args:
      tokens: integers [n], n > seq_len; may be memory-mapped, and is not copied.
      seq_len: L, tokens in a row of a batch.
      held_out: integers [m], m > seq_len; None holds out the last tenth of `tokens`.
      tokenizer: turns the ids into text; one of `hyena_jax.data.tokenizers`. None shows the ids as numbers.
      source: where they came from, for people.

    Raises:
      UserError: if the tokens are not such integers, or are not in the tokenizer's vocabulary.
    """
    train = as_tokens("tokens", tokens)
    if held_out is None:
        cut = int(len(train) * 0.9)
        train, held_out = train[:cut], train[cut:]
    held_out = as_tokens("held_out", held_out)
    kept = None if tokenizer is None else as_kept(tokenizer)
    return token_corpus(train, held_out, seq_len, kept, source)


def from_images(
    images: np.ndarray,
    labels: np.ndarray,
    held_out: tuple[np.ndarray, np.ndarray] | None = None,
    normalization: Normalization | None = None,
    source: str = "an array of images",
) -> "ImageSet | Rows":
    """Images with one label each as a data set, for a model that reads images.

    Args:
      images: uint8 [n, H, W, C] or [n, H, W], which are normalised to mean 0 and std 1; or floating point,
        which are read unchanged.
      labels: integers [n], at least 0.
      held_out: images and labels to evaluate on; None holds out the last tenth.
      normalization: the `encoding` that `load` is given; None fits one to the training part.
      source: where they came from, for people.

    Raises:
      UserError: if an array has another shape or dtype, or the arrays do not fit together.
    """
    train = _labelled("images", images, labels)
    if held_out is None:
        cut = len(train.images) * 9 // 10
        require(cut > 0, "images", len(train.images), "at least 2, to hold one out")
        train, held = (Labelled(*(x[part] for x in train)) for part in (slice(cut), slice(cut, None)))
    else:
        held = _labelled("held_out", *held_out)
    shapes = train.images.shape[1:], held.images.shape[1:]
    require(shapes[0] == shapes[1], "held_out images", shapes[1], f"of the training shape {shapes[0]}")
    dtypes = train.images.dtype, held.images.dtype
    require(dtypes[0] == dtypes[1], "held_out images", dtypes[1].name, f"{dtypes[0].name} as in training")
    if train.images.dtype == np.uint8:
        return image_set(train, held, source, normalization)
    arrays = ({"inputs": part.images, "targets": part.labels} for part in (train, held))
    return from_rows(*arrays, inputs="images", source=source)


def _labelled(argument: str, images: np.ndarray, labels: np.ndarray) -> Labelled:
    images, labels = np.asarray(images), np.asarray(labels)
    images = images[..., None] if images.ndim == 3 else images
    must = "uint8 or floating point [n, H, W, C] or [n, H, W], not empty"
    fits = images.ndim == 4 and images.size > 0
    fits &= images.dtype == np.uint8 or np.issubdtype(images.dtype, np.floating)
    require(fits, argument, described(images), must)
    is_label = labels.shape == images.shape[:1] and np.issubdtype(labels.dtype, np.integer)
    require(is_label, f"labels of {argument}", described(labels), f"integers [{len(images)}]")
    require(labels.min() >= 0, f"labels of {argument}", int(labels.min()), "at least 0")
    return Labelled(images, labels)
