"""Text, images and tasks as batches: NumPy out, no JAX and no models.

README.md in this folder has a training loop of one's own.
"""

from hyena_jax.data.dataset import Batch, Dataset, batches, load
from hyena_jax.data.own import from_images, from_rows, from_tokens
from hyena_jax.data.tokenizers import (
    BpeTokenizer,
    BytesTokenizer,
    CharactersTokenizer,
    DnaTokenizer,
    GraphemesTokenizer,
    IdsTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    read_bpe,
    read_sentencepiece,
)

__all__ = [
    "Batch",
    "BpeTokenizer",
    "BytesTokenizer",
    "CharactersTokenizer",
    "Dataset",
    "DnaTokenizer",
    "GraphemesTokenizer",
    "IdsTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "batches",
    "from_images",
    "from_rows",
    "from_tokens",
    "load",
    "read_bpe",
    "read_sentencepiece",
]
