"""What a model reads, and everything that follows from it."""

from typing import NamedTuple


class InputKind(NamedTuple):
    """What follows from `inputs` of a model's and its data's config."""

    unit: str
    """What is predicted and counted, unless the data say."""
    is_tokens: bool
    """Inputs are token ids [L]: the length can be sharded, prompts be continued, a loss is a perplexity."""
    is_images: bool
    """Inputs are float32 images [height, width, channels], drawn with their predictions after training."""


KINDS = {"tokens": InputKind("token", True, False), "images": InputKind("image", False, True)}


def input_kind(inputs: str) -> InputKind:
    """The kind of `tokens` or `images`; any other word is a kind of the user's, of which nothing is known."""
    return KINDS.get(inputs, InputKind("row", False, False))
