"""Models, and the one place where a config becomes a module."""

from hyena_jax.config import LanguageModelConfig, require
from hyena_jax.models.language_model import LanguageModel

__all__ = ["LanguageModel", "build"]


def build(config: LanguageModelConfig) -> LanguageModel:
    """The module that `config` describes.

    Raises:
      ValueError: if vocab_size is still None (training fills it in from the tokenizer).
    """
    require(config.vocab_size is not None, "vocab_size", config.vocab_size, "known when a model is built")
    return LanguageModel(config)
