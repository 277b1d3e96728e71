"""How tensors of other projects become our parameters, and back: both directions of each transform.

Axes: D inputs, E outputs, C channels, K taps, N modes. Reading keeps the dtype and makes views where it can;
transforms that compute do so in float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hyena_jax.config import AttentionConfig, LocalAttentionConfig

Read = Callable[..., np.ndarray]
Write = Callable[[np.ndarray], tuple[np.ndarray, ...]]


class Transform(NamedTuple):
    """The tensors that a parameter comes from: `read(*tensors) -> parameter`, and its inverse `write`."""

    names: tuple[str, ...]
    read: Read
    write: Write


def same(name: str) -> Transform:
    """As it is."""
    return Transform((name,), lambda x: x, lambda x: (x,))


def columns(names: tuple[str, ...], sizes: tuple[int, ...]) -> Transform:
    """Kernels [E_i, D] of `sizes` E_i, transposed, as the columns of one kernel [D, sum of E_i]."""
    cuts = np.cumsum(sizes)[:-1]
    return Transform(
        names,
        lambda *xs: xs[0].T if len(xs) == 1 else np.concatenate([x.T for x in xs], axis=1),
        lambda x: tuple(part.T for part in np.split(x, cuts, axis=1)),
    )


def transposed(name: str) -> Transform:
    """A kernel [E, D] as [D, E]."""
    return Transform((name,), lambda x: x.T, lambda x: (x.T,))


def dense(ours: str, theirs: str, has_bias: bool = True) -> dict[str, Transform]:
    """A dense layer of PyTorch."""
    found = {f"{ours}/kernel": transposed(f"{theirs}.weight")}
    return found | ({f"{ours}/bias": same(f"{theirs}.bias")} if has_bias else {})


def layer_norm(ours: str, theirs: str) -> dict[str, Transform]:
    """A LayerNorm of PyTorch."""
    return {f"{ours}/scale": same(f"{theirs}.weight"), f"{ours}/bias": same(f"{theirs}.bias")}


def qkv(theirs: str, sizes: tuple[int, int, int]) -> Transform:
    """The kernels of queries, keys and values of transformers as one."""
    return columns(tuple(f"{theirs}.{part}_proj.weight" for part in "qkv"), sizes)


def attention_sizes(mixer: AttentionConfig | LocalAttentionConfig, d_model: int) -> tuple[int, int, int]:
    """The channels of all queries, keys and values."""
    shared = (mixer.n_kv_heads or mixer.n_heads) * d_model // mixer.n_heads
    return d_model, shared, shared


def joined(names: tuple[str, ...], sizes: tuple[int, ...], axis: int = 0) -> Transform:
    """Tensors of `sizes` along an axis, one after the other."""
    cuts = np.cumsum(sizes)[:-1]
    return Transform(
        names, lambda *xs: np.concatenate(xs, axis=axis), lambda x: tuple(np.split(x, cuts, axis=axis))
    )


def reshaped(name: str, theirs: tuple[int, ...], ours: tuple[int, ...]) -> Transform:
    """The same numbers in the same order, in another shape."""
    return Transform((name,), lambda x: x.reshape(ours), lambda x: (x.reshape(theirs),))


def taps(name: str) -> Transform:
    """A depthwise FIR [C, 1, K] whose last tap meets the current input, as [C, K], that tap first."""
    return Transform((name,), lambda x: x[:, 0, ::-1], lambda x: (x[:, None, ::-1],))


def filter_taps(name: str, is_reversed: bool) -> Transform:
    """A filter [C, 1, K] as [1, C, K]; reversed if its last tap meets the current input."""
    step = -1 if is_reversed else 1
    return Transform((name,), lambda x: x[:, 0, ::step][None], lambda x: (x[0][:, None, ::step],))


def less_one(name: str) -> Transform:
    """The factor of an RMSNorm, which is stored here less 1; exact for factors that were bfloat16."""
    one = np.float32(1)
    return Transform((name,), lambda x: np.asarray(x, np.float32) - one, lambda x: (x + one,))


def log_rates(name: str) -> Transform:
    """Negative poles [C, N, 1] as logarithms of rates [1, C, N]."""

    def read(x: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):  # the caller refuses what is not finite
            return np.log(-x[..., 0].astype(np.float64)).astype(np.float32)[None]

    return Transform(
        (name,), read, lambda x: (-np.exp(x[0].astype(np.float64)).astype(np.float32)[..., None],)
    )
