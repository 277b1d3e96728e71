"""Causal convolution with a filter as long as the sequence: y_t = sum_{s=0..t} h_s u_{t-s}.

Axes: C channels, B batch, L length, n points of a transform. Time is the last axis; the axes before it
broadcast, so that u [C, B, L] and h [C, 1, L] give y [C, B, L]. Every form computes in float32 (float64
stays float64) and returns the dtype of u.

The Fourier forms need no padding to 2L points. Weighting both sequences by w^t, with w^n = i, changes their
circular convolution (a product of polynomials modulo x^n - 1) into a product modulo x^n - i: the terms that
wrap around are multiplied by i. For real sequences the real part is then the causal convolution alone, so n =
L complex points suffice instead of 2L real ones (the right-angle convolution of Crandall and Fagin 1994,
Discrete weighted transforms and large-integer arithmetic).
"""

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

Convolution = Callable[[jax.Array, jax.Array], jax.Array]


def long_conv(
    u: jax.Array, h: jax.Array, skip: jax.Array | None = None, method: Convolution | None = None
) -> jax.Array:
    """y = h * u + skip ⊙ u, causal, with the broadcast shape of u and h.

    Args:
      u: input [..., L], real floating point as h, else ValueError.
      h: filter [..., L], broadcast against u before the last axis; another length raises ValueError.
      skip: weight of the input itself [...]; added to h_0, which is equivalent and free.
      method: `fft_conv`, `toeplitz_conv`, `direct_conv`, or one of `fast.matmul_fft`; None is
        `forms_for().convolution`.

    >>> u, h = jnp.ones((2, 3, 5)), jnp.ones((3, 5))
    >>> long_conv(u, h)[0, 0].round().astype(int).tolist()
    [1, 2, 3, 4, 5]
    """
    length = u.shape[-1]
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (u, h)):
        raise ValueError(f"u and h must be real floating point, got {u.dtype} and {h.dtype}")
    if length != h.shape[-1]:
        raise ValueError(f"h must have the length of u: u is {u.shape}, h is {h.shape}")
    if skip is not None:
        h = jnp.asarray(h)
        h = h.at[..., 0].add(jnp.asarray(skip, h.dtype))
    dtype = jnp.float64 if jnp.float64 in (u.dtype, h.dtype) else jnp.float32
    from hyena_jax.ops import forms  # which imports this module

    convolve = method or forms.forms_for().convolution
    if convolve is forms.tpu_conv and u.dtype == jnp.bfloat16:  # its 8 bits of precision need no more
        convolve = partial(forms.tpu_conv, precision="high")
    return convolve(u.astype(dtype), h.astype(dtype)).astype(u.dtype)


def blockwise_conv(
    u: jax.Array,
    h: jax.Array,
    skip: jax.Array | None = None,
    block_len: int | None = None,
    future: jax.Array | None = None,
    method: Convolution | None = None,
) -> jax.Array:
    """`long_conv` of many channels with few filters; each block of the sequence is convolved by itself.

    Args:
      u: input [G, w, B, L]; each of the G groups of channels is convolved with the same filters.
      h: filters [w / J, >= L]; only the first L taps are used. Channels c J .. c J + J - 1 of a group have
        filter c.
      skip: [w], as in `long_conv`.
      block_len: steps of a block; None: the whole sequence is one block.
      future: filters [w / J, >= L] of the reversed sequence, whose output is added; lag 0 counts in both.
    """
    n_groups, width, batch, length = u.shape
    taps, n_shared = min(length, block_len or length), width // len(h)
    n_blocks = -(-length // taps)
    blocks = jnp.pad(u, [(0, 0), (0, 0), (0, 0), (0, n_blocks * taps - length)])
    blocks = blocks.reshape(n_groups, len(h), n_shared * batch * n_blocks, taps)
    shares = n_shared > 1  # channels with a filter in common still have skips of their own
    y = long_conv(blocks, h[:, None, :taps], None if skip is None or shares else skip[:, None], method)
    if future is not None:
        y = y + long_conv(blocks[..., ::-1], future[:, None, :taps], method=method)[..., ::-1]
    y = y.reshape(n_groups, width, batch, -1)[..., :length]
    if skip is not None and shares:
        y = y + skip[:, None, None].astype(y.dtype) * u
    return y


def direct_conv(u: jax.Array, h: jax.Array) -> jax.Array:
    """y = h * u [..., L] by its definition: one shifted product per lag, O(L^2)."""
    length = u.shape[-1]
    padded = jnp.pad(u, [(0, 0)] * (u.ndim - 1) + [(length - 1, 0)])

    def add_lag(y: jax.Array, lag: jax.Array) -> tuple[jax.Array, None]:
        shifted = jax.lax.dynamic_slice_in_dim(padded, length - 1 - lag, length, axis=-1)
        return y + jnp.take(h, lag, axis=-1)[..., None] * shifted, None

    zero = jnp.zeros(jnp.broadcast_shapes(u.shape, h.shape), u.dtype)
    return jax.lax.scan(add_lag, zero, jnp.arange(length))[0]


def toeplitz_conv(u: jax.Array, h: jax.Array) -> jax.Array:
    """y = h * u [..., L] as the product with the Toeplitz matrix of h: for short sequences."""
    if u.ndim > 1 and h.ndim > 1 and h.shape[-2] == 1:  # one matrix for all rows of u
        return jnp.matmul(u, jnp.swapaxes(toeplitz(h[..., 0, :]), -1, -2), precision="highest")
    return jnp.einsum("...ts,...s->...t", toeplitz(h), u, precision="highest")


def toeplitz(h: jax.Array) -> jax.Array:
    """S_h [..., L, L] of h [..., L], with S_h[t, s] = h_{t-s} for s <= t and 0 above the diagonal."""
    *lead, length = h.shape
    # Column s of S_h is h moved down by s. Writing (h, 0) of 2L entries L times and reading that back in
    # rows of 2L - 1 moves row s right by s: no gather, whose derivative would be a slow scatter.
    padded = jnp.concatenate([h, jnp.zeros_like(h)], axis=-1)
    repeated = jnp.broadcast_to(padded[..., None, :], (*lead, length, 2 * length)).reshape(*lead, -1)
    skewed = repeated[..., : length * (2 * length - 1)].reshape(*lead, length, 2 * length - 1)
    return jnp.swapaxes(skewed[..., :length], -1, -2)


class Transform(NamedTuple):
    """A Fourier transform of the last axis, in any order of frequencies, and its inverse."""

    forward: Callable[[jax.Array], jax.Array]
    inverse: Callable[[jax.Array], jax.Array]


def fft_conv(u: jax.Array, h: jax.Array) -> jax.Array:
    """y = h * u [..., L] by FFTs, O(L log L): three transforms in the forward pass, three in the backward."""
    return spectral_conv(u, h, FFT, fft_len(u.shape[-1]))


def spectral_conv(u: jax.Array, h: jax.Array, transform: Transform, n: int) -> jax.Array:
    """y = h * u [..., L] by `transform` with n points."""
    return _signal(_spectrum(u, transform, n) * _spectrum(h, transform, n), transform, u.shape[-1])


def _spectrum(x: jax.Array, transform: Transform, n: int) -> jax.Array:
    """Transform of w^t x_t with w^n = i: complex [..., n]."""
    length = x.shape[-1]
    cos, sin = _right_angle(length, n, x.dtype)
    turned = jax.lax.complex(x * cos, x * sin)
    return transform.forward(jnp.pad(turned, [(0, 0)] * (x.ndim - 1) + [(0, n - length)]))


def _signal(spectrum: jax.Array, transform: Transform, length: int) -> jax.Array:
    """The real part of w^-t times the inverse transform, for t < length."""
    turned = transform.inverse(spectrum)[..., :length]
    cos, sin = _right_angle(length, spectrum.shape[-1], turned.real.dtype)
    return turned.real * cos + turned.imag * sin


@lru_cache(maxsize=8)  # one array where several transforms need it, so that XLA gets one constant
def _right_angle(length: int, n: int, dtype: jnp.dtype) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of the angles of w^t for t < length: a quarter of a turn in n steps."""
    angle = np.arange(length) * (np.pi / (2 * n))
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


def _sharded(transform: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A transform of the last axis; where XLA shards arrays, each device transforms some of the rows.

    XLA's own sharding of an FFT ends the process unless the square of the number of shards divides the length
    (fft_handler.cc), and the CPU's FFT refuses the layouts that XLA chooses (fft_thunk.cc).
    """

    def row_major(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))

    def apply(x: jax.Array) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        axes = mesh.auto_axes
        if not axes:
            return transform(x)
        n_devices = prod(mesh.shape[name] for name in axes)
        # The axis before time is the batch, sharded as on the devices; if it has one entry, channels are
        # sharded.
        candidates = [i for i in reversed(range(x.ndim - 1)) if x.shape[i] % n_devices == 0]
        spec = PartitionSpec(*(axes if i in candidates[:1] else None for i in range(x.ndim)))
        local = jax.shard_map(
            lambda x: row_major(transform(row_major(x))), in_specs=spec, out_specs=spec, axis_names=set(axes)
        )
        return local(x)

    return apply


FFT = Transform(_sharded(jnp.fft.fft), _sharded(jnp.fft.ifft))


def fft_len(least: int) -> int:
    """The smallest number >= least without a prime factor above 5: sizes that FFTs are fast at."""
    if least < 1:
        raise ValueError(f"length must be at least 1, got {least}")
    from scipy.fft import next_fast_len  # imports slowly

    return next_fast_len(least, real=True)
