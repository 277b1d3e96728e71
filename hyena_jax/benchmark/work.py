"""Work of the pieces that mixers are made of, in FLOPs and in elements of the arrays they write.

A multiply-add is 2 FLOPs, an elementary function 1, a real transform of n points 2.5 n log2 n.
"""

from dataclasses import dataclass
from math import log2

PARAMETER_BYTES = 4


@dataclass(frozen=True)
class Work:
    """FLOPs of a forward pass by kind, and elements of the arrays that it has to write or read."""

    products: float = 0.0
    """Of matrix products. The derivative takes two more of the same size: 3 in all."""
    transforms: float = 0.0
    """Of FFTs. A convolution keeps its spectra, so that the derivative takes as many again: 2 in all."""
    other: float = 0.0
    """Element by element; 3 in all."""
    activations: float = 0.0
    """Elements of the input, of what each equation defines, and of the output. Not the weights of softmax
    attention, which a fused kernel never writes."""

    def __add__(self, more: "Work") -> "Work":
        return Work(
            self.products + more.products,
            self.transforms + more.transforms,
            self.other + more.other,
            self.activations + more.activations,
        )

    @property
    def forward(self) -> float:
        """FLOPs of the forward pass."""
        return self.products + self.transforms + self.other

    @property
    def forward_backward(self) -> float:
        """FLOPs of forward and backward pass, without what is computed again to save memory."""
        return 3 * self.products + 2 * self.transforms + 3 * self.other

    def forward_bytes(self, n_params: int, itemsize: int) -> float:
        """Bytes if every parameter (float32) and activation is moved once: the least traffic."""
        return PARAMETER_BYTES * n_params + itemsize * self.activations


def transform(n: int) -> float:
    """FLOPs of one real transform of n points."""
    return 2.5 * n * log2(max(n, 2))


def dense(n_tokens: int, fan_in: int, fan_out: int) -> Work:
    """x W."""
    return Work(products=2 * n_tokens * fan_in * fan_out, activations=n_tokens * fan_out)


def short_conv(n_tokens: int, channels: int, taps: int) -> Work:
    """A depthwise FIR."""
    return Work(other=2 * n_tokens * channels * taps, activations=n_tokens * channels)


def elementwise(n_tokens: int, channels: int, flops: int = 1) -> Work:
    """One new array."""
    return Work(other=flops * n_tokens * channels, activations=n_tokens * channels)


def long_conv(batch: int, length: int, channels: int, n_rows: int) -> Work:
    """An FFT convolution of `channels` inputs with `n_rows` different filters, in 2 L points."""
    n_transforms = 2 * batch * channels + n_rows
    return Work(
        transforms=n_transforms * transform(2 * length),
        other=6 * batch * channels * (length + 1),
        activations=batch * channels * length,
    )


def pairs(length: int, causal: bool = True, window: int | None = None) -> int:
    """Query and key pairs that see each other."""
    if not causal:
        return length**2
    reach = length if window is None else min(window + 1, length)
    return reach * (reach + 1) // 2 + (length - reach) * reach
