"""Dense layers, norms and activations: the layers that act on each token by itself.

`params` are the dictionaries of the Flax layers, as NumPy arrays.
"""

import math

import numpy as np


def dense(params: dict, x: np.ndarray) -> np.ndarray:
    """x W + b, or x W if the layer has no bias."""
    return np.float64(x) @ np.float64(params["kernel"]) + np.float64(params.get("bias", 0))


def norm(params: dict | None, x: np.ndarray, kind: str, eps: float | None = None) -> np.ndarray:
    """LayerNorm, RMSNorm with factor 1 + scale, its form with eps outside the root, or nothing."""
    if kind == "layer":
        centred = x - x.mean(axis=-1, keepdims=True)
        y = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + (1e-5 if eps is None else eps))
        return y * np.float64(params["scale"]) + np.float64(params["bias"])
    eps = 1e-6 if eps is None else eps
    mean_square = (x**2).mean(axis=-1, keepdims=True)
    if kind == "rms":
        return x / np.sqrt(mean_square + eps) * (1 + np.float64(params["scale"]))
    if kind == "rms_eps_outside":
        return x / (np.sqrt(mean_square) + eps) * (1 + np.float64(params["scale"]))
    return x


def gelu(x: np.ndarray) -> np.ndarray:
    """x Phi(x), Phi the normal distribution function."""
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """The tanh approximation of `gelu`."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^{-x})."""
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e^x)."""
    return np.logaddexp(0, x)


# By the names that options have.
ACTIVATIONS = {
    "none": lambda x: x,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
    "silu": silu,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
}
