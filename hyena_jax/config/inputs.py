"""The kinds of inputs that models read, and the properties of each kind."""

from typing import NamedTuple


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
