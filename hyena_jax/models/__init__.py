"""Models, and the one place where a config becomes a module."""

from hyena_jax.config import ImageClassifierConfig, LanguageModelConfig, ModelConfig, require
from hyena_jax.models.blocks import sequence_layout
from hyena_jax.models.image_classifier import ImageClassifier
from hyena_jax.models.language_model import LanguageModel

__all__ = ["ImageClassifier", "LanguageModel", "build"]

# What a config may leave to the data, and must hold when a model is built.
SIZES_OF_THE_DATA = {
    LanguageModelConfig: ("vocab_size",),
    ImageClassifierConfig: ("image_size", "channels", "n_classes"),
}


def build(config: ModelConfig, sequence_axis: str | None = None) -> LanguageModel | ImageClassifier:
    """The module that `config` describes.

    Args:
      sequence_axis: axis of the ambient mesh (`jax.set_mesh`) over whose devices a language model's sequences
        are shared out, when it is called; None shares out none. The parameters do not depend on it.

    Raises:
      ValueError: if vocab_size, image_size, channels or n_classes is still None (training fills them in from
        the data); or if a sequence axis is given for images, or for a mixer that cannot share out its length.
    """
    known = " or ".join(config_class.__name__ for config_class in SIZES_OF_THE_DATA)
    require(type(config) in SIZES_OF_THE_DATA, "config", config, f"a {known}")
    for name in SIZES_OF_THE_DATA[type(config)]:
        value = getattr(config, name)
        require(value is not None, name, value, "known when a model is built")
    if isinstance(config, LanguageModelConfig):
        for mixer in config.pattern:
            sequence_layout(mixer, sequence_axis)
        return LanguageModel(config, sequence_axis)
    require(sequence_axis is None, "sequence_axis", sequence_axis, "None for an image classifier")
    return ImageClassifier(config)
